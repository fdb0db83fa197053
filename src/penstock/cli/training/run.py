"""One run of `penstock train`, from the request to the saved model."""

import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from torch import nn
from transformers.utils import logging

from penstock.cli.ranks import Ranks, joined
from penstock.cli.training.best import BestCheckpoint
from penstock.cli.training.checkpoints import Checkpoints, best_of, checkpoint_to_resume
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data import (
    Corpus,
    encode_corpus,
    find_files,
    read_pieces,
    sequence_count,
    standard_library_files,
)
from penstock.cli.training.evaluation import Evaluations
from penstock.cli.training.feed import CorpusFeed
from penstock.cli.training.interruption import Interruption, asked_to_end
from penstock.cli.training.loop import Stepper, Training, Why
from penstock.cli.training.loss import Loss
from penstock.cli.training.model import build, check_compiler, computing, sample_ids
from penstock.cli.training.optimizer import about_decay, prepare_model, resolve_precision
from penstock.cli.training.optimizer_arguments import optimizer_arguments
from penstock.cli.training.recipe import Course, Recipe, recipe_for
from penstock.cli.training.reports import METRICS_NAME, Reports, format_seconds, printable
from penstock.cli.training.runfile import RUN_NAME, resolved_by, write_run_file
from penstock.cli.training.schedule import rate_factor
from penstock.cli.training.settings.common import ON
from penstock.errors import ConfigError
from penstock.integrations.chunked import check_chunkable
from penstock.integrations.huggingface import ModelSource, find_model, save_pretrained
from penstock.integrations.tokenizers import Tokenizer, tokenizer_for

PROMPT_TOKENS = 32
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json")


def run(config: TrainConfig, interruption: Interruption) -> bool:
    """Train as the settings say. Every rank of the launcher calls this.

    Until an earlier run's files are touched, a signal ends the command; from then on it is noted.

    1. Check the request: everything that can be wrong with it, before anything is allocated.
    2. Read the text as tokens: a stream to train on, a stream held out.
    3. Meet the other ranks, build the model and prepare it.
    4. Go on from a checkpoint if asked.
    5. Train, and measure the held-out loss. A run that is asked to end ends here.
    6. Go back to the lowest held-out loss if asked.
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
    source, recipe, files = _checked(config, ranks)
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
        rate_factor(config, course)
        reports.note(_about_text(corpus, course, file_count=len(files)))
        # 3.
        resumed = checkpoint_to_resume(config)
        with joined(ranks), computing(source):
            model, weights = build(source, config)
            about = _about_run(model, corpus, config, ranks)  # before it is sharded, which changes its parameters
            reports.note(about_decay(model, config))
            loss = Loss(model)
            optimizer = prepare_model(model, config, course, ranks, weights=weights)
            # 4.
            feed = CorpusFeed(corpus, config, course, ranks)
            checkpoints = Checkpoints(config, course, optimizer, feed.identity())
            start = checkpoints.resume(resumed)
            if start.step:
                differing = f", with {checkpoints.changed}" if checkpoints.changed else ""
                reports.note(f"goes on after step {start.step}{differing}")
            best = BestCheckpoint(best_of(config), optimizer, ranks, reports)
            if config.keeps_best:
                best.look(checkpoints.best)
            # Nothing can be refused any more: what an earlier run has left may go.
            interruption.defer()
            reports.start(goes_on=resumed is not None, **about)
            if ranks.is_first:
                resolved = resolved_by(config, course) | {
                    "precision": resolve_precision(config.precision, ranks.device)
                }
                write_run_file(config, resolved, world_size=ranks.world_size)
            # 5.
            measures = Evaluations(model, loss, feed, ranks, reports, interruption, token_name=corpus.token_name)
            evaluations = measures if config.eval_sequences else None
            stepper = Stepper(loss, optimizer, course, ranks)
            training = Training(stepper, feed, checkpoints, evaluations, config, reports, interruption)
            ending = training.run(start)
            if ending.why is Why.ASKED:
                reports.note(asked_to_end(step=ending.position.step))
                optimizer.close(keep_params=False)
                return False
            # 6.
            loss_after = ending.loss_after
            if config.keeps_best and best.go_back(checkpoints.best, ending.position.step):
                loss_after = checkpoints.best.loss
            # 7.
            save_pretrained(model, optimizer, config.out, is_first_rank=ranks.is_first)
            if ranks.is_first:
                tokenizer.save(config.out)
            reports.note(f"saved the model in {config.out}")
            # 8. After the model is saved: what goes wrong here takes nothing of it away. Who was asked to end has none.
            sample = None
            if config.sample_tokens and not ranks.any(interruption.asked):
                sample = _sample(model, tokenizer, corpus, config, course, ranks)
                reports.note(f"sample:\n{printable(sample)}")
            optimizer.close(keep_params=False)
            seconds = time.perf_counter() - began
            reports.end(loss_before=ending.loss_before, loss_after=loss_after, seconds=seconds, sample=sample)
        reports.note(f"done in {format_seconds(seconds)}")
    return True


def _checked(config: TrainConfig, ranks: Ranks) -> tuple[ModelSource, Recipe, list[Path]]:
    """Find everything that can be wrong with the request before the text is read, and what it names."""
    source = find_model(config.model, seq_length=config.seq_length or 2, trust_remote_code=config.trust_remote_code)
    recipe = recipe_for(config, positions=source.max_seq_length, world_size=ranks.world_size)
    logging.disable_progress_bar()  # the display of the run is the only one
    config.placement()
    config.options()
    optimizer_arguments(config)
    if config.compile:
        check_compiler(ranks.device)
    if config.chunked_loss == ON:
        check_chunkable(source.model_class)
    files = find_files(config.data) if config.data else standard_library_files()
    return source, recipe, files


def _check_out(config: TrainConfig, source: ModelSource) -> None:
    """Refuse a folder that cannot be written, before hours of training; nothing that is in it changes."""
    if source.folder is not None and source.folder.resolve() == config.out.resolve():
        raise ConfigError(f"--out {str(config.out)!r} is the folder of --model, which it would overwrite. Use another.")
    check_trackers(config.report_to)
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.out):
            pass
        for name in (METRICS_NAME, RUN_NAME, *MODEL_FILES):
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


def _sample(
    model: nn.Module, tokenizer: Tokenizer, corpus: Corpus, config: TrainConfig, course: Course, ranks: Ranks
) -> str:
    """Continue the prompt, or the beginning of the held-out text, and return both. Every rank calls it."""
    prompt = tokenizer.encode(config.prompt[0]) if config.prompt else corpus.held_out[:PROMPT_TOKENS]
    prompt_ids = [int(i) for i in prompt]
    return tokenizer.decode(prompt_ids + sample_ids(model, prompt_ids, config, course, ranks))


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
