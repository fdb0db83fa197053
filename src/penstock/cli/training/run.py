"""One run of `penstock train`, from the request to the saved model."""

import tempfile
import time
from importlib.metadata import version

from torch import nn
from transformers.utils import logging

import penstock
from penstock.cli.ranks import Ranks, joined
from penstock.cli.training.checkpoints import Checkpoints, checkpoint_to_resume
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data import (
    Corpus,
    encode_corpus,
    find_files,
    read_pieces,
    sequence_count,
    standard_library_files,
)
from penstock.cli.training.loop import train_steps
from penstock.cli.training.model import build, computing, held_out_loss
from penstock.cli.training.optimizer import prepare_model, resolve_precision
from penstock.cli.training.recipe import Course, recipe_for
from penstock.cli.training.reporting.formats import format_seconds
from penstock.cli.training.reporting.metrics import METRICS_NAME
from penstock.cli.training.reporting.reports import Reports
from penstock.cli.training.reporting.samples import Prompt, Sample, Sampling, stop_ids_of, text_prompts, write_samples
from penstock.cli.training.reporting.trackers import check_trackers
from penstock.cli.training.reporting.waits import TRACE_NAME
from penstock.cli.training.settings.common import ON
from penstock.errors import ConfigError
from penstock.integrations.chunked import check_chunkable
from penstock.integrations.huggingface import ModelSource, find_model, save_pretrained
from penstock.integrations.tokenizers import Tokenizer, tokenizer_for

PROMPT_TOKENS = 32
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json")


def run(config: TrainConfig) -> bool:
    """Train as the settings say. Every rank of the launcher calls this.

    1. Check the request: everything that can be wrong with it, before anything is allocated.
    2. Read the text as tokens: a stream to train on, a stream held out.
    3. Meet the other ranks, build the model and prepare it.
    4. Go on from a checkpoint if asked; measure the held-out loss.
    5. Train. A run that is asked to end ends here.
    6. Measure the held-out loss again.
    7. Save the model.
    8. Write samples.

    Returns:
        Whether it came to its end. If not, it was asked to end, and has saved a checkpoint to go on from.

    Raises:
        ConfigError: the request cannot be met.
        CheckpointError: the checkpoint to go on from is damaged, or one cannot be written.
    """
    began = time.perf_counter()
    ranks = Ranks.from_environment()
    # 1.
    source = find_model(config.model, seq_length=config.seq_length or 2, trust_remote_code=config.trust_remote_code)
    recipe = recipe_for(config, positions=source.max_seq_length, world_size=ranks.world_size)
    logging.disable_progress_bar()  # the display of the run is the only one
    config.placement()
    config.options()
    if config.chunked_loss == ON:
        check_chunkable(source.model_class)
    files = find_files(config.data) if config.data else standard_library_files()
    if ranks.is_first:
        _check_out(config, source)
    with Reports(config, is_first_rank=ranks.is_first) as reports:
        # 2.
        tokenizer = tokenizer_for(
            source.folder, vocab_size=source.vocab_size, trust_remote_code=config.trust_remote_code
        )
        pieces = (piece for path in files for piece in read_pieces(path, jsonl_field=config.text_field))
        corpus = encode_corpus(pieces, tokenizer, seq_length=recipe.seq_length)
        course = recipe.over(config, sequence_count(len(corpus.train), recipe.seq_length))
        reports.note(_about_text(corpus, course, file_count=len(files)))
        # 3.
        resumed = checkpoint_to_resume(config)
        with joined(ranks), computing(source):
            model, weights = build(source, config)
            about = _about_run(model, corpus, config, ranks)  # before it is sharded, which changes its parameters
            optimizer = prepare_model(model, config, course, ranks, weights=weights)
            # 4.
            checkpoints = Checkpoints(config, course, optimizer, corpus.train)
            start = checkpoints.resume(resumed)
            if start.step:
                differing = f", with {checkpoints.changed}" if checkpoints.changed else ""
                reports.note(f"goes on after step {start.step}{differing}")
            # Nothing can be refused any more: what an earlier run has left may go.
            reports.start(goes_on=resumed is not None, **about)
            loss_before = _measure(model, corpus, config, course, ranks, reports, step=start.step)
            # 5.
            end = train_steps(model, optimizer, checkpoints, start, corpus.train, config, course, ranks, reports)
            if end.step < course.steps:
                reports.note(f"asked to end: saved step {end.step}; go on with --resume auto")
                optimizer.close(keep_params=False)
                return False
            # 6.
            loss_after = _measure(model, corpus, config, course, ranks, reports, step=course.steps)
            # 7.
            save_pretrained(model, optimizer, config.out, is_first_rank=ranks.is_first)
            if ranks.is_first:
                tokenizer.save(config.out)
            reports.note(f"saved the model in {config.out}")
            # 8. After the model is saved: what goes wrong here takes nothing of it away.
            reports.samples(course.steps, _samples(model, optimizer, tokenizer, corpus, config, course, ranks))
            optimizer.close(keep_params=False)
            seconds = time.perf_counter() - began
            reports.end(loss_before=loss_before, loss_after=loss_after, seconds=seconds, model=str(config.out))
        reports.note(f"done in {format_seconds(seconds)}")
    return True


def _check_out(config: TrainConfig, source: ModelSource) -> None:
    """Refuse a folder that cannot be written, before hours of training; nothing that is in it changes."""
    if source.folder is not None and source.folder.resolve() == config.out.resolve():
        raise ConfigError(f"--out {str(config.out)!r} is the folder of --model, which it would overwrite. Use another.")
    check_trackers(config.report_to)
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.out):
            pass
        for name in (METRICS_NAME, TRACE_NAME, *MODEL_FILES):
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


def _measure(
    model: nn.Module, corpus: Corpus, config: TrainConfig, course: Course, ranks: Ranks, reports: Reports, *, step: int
) -> float | None:
    """Measure the held-out loss after some steps, and report it. Every rank calls it."""
    if config.eval_sequences == 0:
        return None
    began = time.perf_counter()
    loss = held_out_loss(model, corpus.held_out, config, course, ranks)
    reports.evaluation(step, loss, time.perf_counter() - began, token_name=corpus.token_name)
    return loss


def _samples(
    model: nn.Module,
    optimizer: penstock.Optimizer,
    tokenizer: Tokenizer,
    corpus: Corpus,
    config: TrainConfig,
    course: Course,
    ranks: Ranks,
) -> list[Sample]:
    """Continue the prompts, or the beginning of the held-out text. Every rank calls it."""
    held_out = tuple(int(i) for i in corpus.held_out[:PROMPT_TOKENS])
    prompts = text_prompts(config.prompt, tokenizer.encode) or [Prompt(tokenizer.decode(held_out), held_out)]
    sampling = Sampling(
        token_count=config.sample_tokens,
        seq_length=course.seq_length,
        seed=config.seed,
        stop_ids=stop_ids_of(model, tokenizer.end_of_document),
    )
    return write_samples(model, optimizer, prompts, tokenizer.decode, sampling, ranks)


def _about_text(corpus: Corpus, course: Course, *, file_count: int) -> str:
    """Say in a line what is trained on."""
    count = sequence_count(len(corpus.train), course.seq_length)
    return (
        f"{file_count:,} files, {corpus.document_count:,} documents: {len(corpus.train):,} tokens to train on "
        f"({count:,} sequences of {course.seq_length}), {len(corpus.held_out):,} held out"
    )


def _about_run(model: nn.Module, corpus: Corpus, config: TrainConfig, ranks: Ranks) -> dict[str, object]:
    """List what `metrics.jsonl` says of a run at its start."""
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
