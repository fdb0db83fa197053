"""One run of `penstock train`, from the request to the saved model."""

import contextlib
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version

import torch
from torch import nn
from transformers.utils import logging

from penstock.cli.training.batches import sequence_count
from penstock.cli.training.checkpoints import Checkpoints, checkpoint_to_resume
from penstock.cli.training.computing import computing
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.corpus import Corpus, encode_corpus
from penstock.cli.training.display import Display, open_display
from penstock.cli.training.evaluate import held_out_loss
from penstock.cli.training.files import find_files, read_pieces, standard_library_files
from penstock.cli.training.loop import train_steps
from penstock.cli.training.metrics import METRICS_NAME, Metrics, check_tensorboard, open_metrics
from penstock.cli.training.optimizer import prepare_model
from penstock.cli.training.precision import resolve_precision
from penstock.cli.training.progress import format_seconds
from penstock.cli.training.ranks import Ranks, joined
from penstock.cli.training.sample import printable, sample_ids
from penstock.errors import ConfigError
from penstock.integrations.chunked import check_chunkable, chunk_loss
from penstock.integrations.huggingface import (
    ModelSource,
    build_empty,
    build_model,
    enable_activation_checkpointing,
    find_model,
    save_pretrained,
)
from penstock.integrations.tokenizers import Tokenizer, tokenizer_for

PROMPT_TOKENS = 32
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True)
class Result:
    """What a run came to. Losses are nats per token on held-out text, `None` where they were not measured.

    Attributes:
        interrupted: it was asked to end, and saved a checkpoint to go on from.
    """

    loss_before: float | None
    loss_after: float | None
    seconds: float
    interrupted: bool = False


def run(config: TrainConfig) -> Result:
    """Train as the settings say. Every rank of the launcher calls this.

    1. Check the request: everything that can be wrong with it, before anything is allocated.
    2. Read the text as tokens: a stream to train on, a stream held out.
    3. Meet the other ranks, build the model and prepare it.
    4. Go on from a checkpoint if asked; measure the held-out loss.
    5. Train. A run that is asked to end ends here.
    6. Measure the held-out loss again.
    7. Save the model.
    8. Write a sample.

    Raises:
        ConfigError: the request cannot be met.
        CheckpointError: the checkpoint to go on from is damaged, or one cannot be written.
    """
    began = time.perf_counter()
    ranks = Ranks.from_environment()
    # 1.
    source = find_model(config.model, seq_length=config.seq_length, trust_remote_code=config.trust_remote_code)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the display of the run is the only one
    config.placement()
    config.options()
    if config.chunked_loss:
        check_chunkable(source.model_class)
    files = find_files(config.data) if config.data else standard_library_files()
    if ranks.is_first:
        _check_out(config, source)
    with open_display(is_first_rank=ranks.is_first) as display:
        # 2.
        tokenizer = tokenizer_for(
            source.folder, vocab_size=source.vocab_size, trust_remote_code=config.trust_remote_code
        )
        pieces = (piece for path in files for piece in read_pieces(path, jsonl_field=config.jsonl_field))
        corpus = encode_corpus(pieces, tokenizer, seq_length=config.seq_length)
        display.note(_about_text(corpus, config, file_count=len(files)))
        # 3.
        resumed = checkpoint_to_resume(config)
        with joined(ranks), computing(source), contextlib.ExitStack() as reports:
            torch.manual_seed(config.seed)
            empty = build_empty(source)
            model = build_model(source) if empty is None else empty
            if config.activation_checkpointing:
                enable_activation_checkpointing(model)
            if config.chunked_loss:
                chunk_loss(model)
            about = _about_run(model, corpus, config, ranks)
            optimizer = prepare_model(model, config, ranks, weights=source.folder if empty is not None else None)
            # 4.
            checkpoints = Checkpoints(config, optimizer, corpus.train)
            start = checkpoints.resume(resumed)
            if start.step:
                differing = f", with {checkpoints.changed}" if checkpoints.changed else ""
                display.note(f"goes on after step {start.step}{differing}")
            # Nothing can be refused any more: what an earlier run has left may go.
            metrics = reports.enter_context(
                open_metrics(config, is_first_rank=ranks.is_first, goes_on=resumed is not None)
            )
            metrics.start(**about)
            measure = _Measure(model, corpus, tokenizer.token_name, config, ranks, display, metrics)
            loss_before = measure(step=start.step)
            # 5.
            end = train_steps(model, optimizer, checkpoints, start, corpus.train, config, ranks, display, metrics)
            if end.step < config.steps:
                display.note(f"asked to end: saved step {end.step}; go on with --resume auto")
                optimizer.close(keep_params=False)
                return Result(loss_before, None, time.perf_counter() - began, interrupted=True)
            # 6.
            loss_after = measure(step=config.steps)
            # 7.
            save_pretrained(model, optimizer, config.out, is_first_rank=ranks.is_first)
            if ranks.is_first:
                tokenizer.save(config.out)
            display.note(f"saved the model in {config.out}")
            # 8.
            sample = _sample(model, tokenizer, corpus, config, ranks) if config.sample_tokens else None
            if sample is not None:
                display.note(f"sample:\n{printable(sample)}")
            optimizer.close(keep_params=False)
            result = Result(loss_before, loss_after, time.perf_counter() - began)
            metrics.end(loss_before=loss_before, loss_after=loss_after, seconds=result.seconds, sample=sample)
        display.note(f"done in {format_seconds(result.seconds)}")
    return result


def _check_out(config: TrainConfig, source: ModelSource) -> None:
    if source.folder is not None and source.folder.resolve() == config.out.resolve():
        raise ConfigError(f"--out {str(config.out)!r} is the folder of --model, which it would overwrite. Use another.")
    if config.tensorboard:
        check_tensorboard()
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.out):
            pass
        for name in (METRICS_NAME, *MODEL_FILES):
            file = config.out / name
            if file.is_symlink() or file.exists():
                if not file.is_file():
                    raise ConfigError(f"{file} is no file, and would be written. Use another --out.")
                with file.open("r+b"):
                    pass
    except OSError as error:
        where = error.filename if error.filename not in (None, str(config.out)) else ""
        raise ConfigError(
            f"--out {str(config.out)!r} cannot be written: {error.strerror}{where and f' ({where})'}. Use another."
        ) from error


@dataclass(frozen=True)
class _Measure:
    """Measures the held-out loss and reports it; collective."""

    model: nn.Module
    corpus: Corpus
    token_name: str
    config: TrainConfig
    ranks: Ranks
    display: Display
    metrics: Metrics

    def __call__(self, *, step: int) -> float | None:
        if self.config.eval_sequences == 0:
            return None
        began = time.perf_counter()
        loss = held_out_loss(self.model, self.corpus.held_out, self.config, self.ranks)
        seconds = time.perf_counter() - began
        self.display.note(f"held-out loss {loss:.4f} nats per {self.token_name} after {step} steps")
        self.metrics.evaluation(step, loss, seconds)
        return loss


def _sample(model: nn.Module, tokenizer: Tokenizer, corpus: Corpus, config: TrainConfig, ranks: Ranks) -> str:
    """The prompt and its continuation; collective."""
    prompt = tokenizer.encode(config.prompt) if config.prompt else corpus.held_out[:PROMPT_TOKENS]
    prompt_ids = [int(i) for i in prompt]
    ids = sample_ids(
        model,
        prompt_ids,
        token_count=config.sample_tokens,
        context_length=config.seq_length,
        seed=config.seed,
        ranks=ranks,
    )
    return tokenizer.decode(prompt_ids + ids)


def _about_text(corpus: Corpus, config: TrainConfig, *, file_count: int) -> str:
    count = sequence_count(len(corpus.train), config.seq_length)
    return (
        f"{file_count:,} files, {corpus.document_count:,} documents: {len(corpus.train):,} tokens to train on "
        f"({count:,} sequences of {config.seq_length}), {len(corpus.held_out):,} held out"
    )


def _about_run(model: nn.Module, corpus: Corpus, config: TrainConfig, ranks: Ranks) -> dict[str, object]:
    return {
        "config": config.to_dict(),
        "world_size": ranks.world_size,
        "device": str(ranks.device),
        "precision": resolve_precision(config.precision, ranks.device),
        "parameter_count": sum(p.numel() for p in model.parameters()),
        "train_tokens": len(corpus.train),
        "held_out_tokens": len(corpus.held_out),
        "document_count": corpus.document_count,
        "versions": {name: version(name) for name in ("penstock", "torch", "transformers")},
    }
