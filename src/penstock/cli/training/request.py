"""What is asked for, and everything that can be wrong with it, before the data is read and anything is allocated."""

import tempfile
from dataclasses import dataclass

from transformers.utils import logging

from penstock.cli.ranks import Ranks
from penstock.cli.reporting.page import PAGE_NAME
from penstock.cli.reporting.run import METRICS_NAME
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data.dataset import Shape, find_all
from penstock.cli.training.data.reading.sources import Source
from penstock.cli.training.fitting import ITEMSIZES
from penstock.cli.training.learning.checkpoints import AUTO as RESUME_AUTO
from penstock.cli.training.learning.checkpoints import per_step_before
from penstock.cli.training.learning.model import check_compiler
from penstock.cli.training.learning.optimizer_arguments import optimizer_arguments
from penstock.cli.training.learning.sharing import check_mesh
from penstock.cli.training.planning import PLAN_NAME
from penstock.cli.training.precision import Precision, resolve_precision
from penstock.cli.training.recipe import Recipe, recipe_for
from penstock.cli.training.reporting.trackers import check_trackers
from penstock.cli.training.reporting.waits import TRACE_NAME
from penstock.cli.training.runfile import RUN_NAME
from penstock.cli.training.settings.common import AUTO, OFF, ON
from penstock.cli.training.sizes import StepSizes, step_sizes
from penstock.errors import ConfigError
from penstock.files import check_own
from penstock.integrations.chunked import check_chunkable
from penstock.integrations.engine_internals import resolve
from penstock.integrations.families import Feature, is_known, why_not_isolated
from penstock.integrations.huggingface import ModelSource, find_model
from penstock.integrations.lora import Lora, check_precision, parse_lora
from penstock.integrations.tokenizers import Tokenizer, tokenizer_for
from penstock.integrations.vocabulary import vocabulary_for
from penstock.planner import Plan

MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A run that was found to be possible, as far as that can be told without its data.

    Attributes:
        config: the settings.
        ranks: the place of this process.
        source: where the model comes from.
        lora: the adapters that are trained beside it; `None` trains all of it.
        precision: what is computed in.
        tokenizer: what makes ids.
        vocab_size: rows of the embedding, with those that it grows.
        recipe: what a step is.
        sources: what is trained on, and what is held out.
        packed: whether several rows may be in a sequence.
        why_padded: why they are not, where nobody has asked for that; else empty.
        sizes: of a micro-batch; `None` where the model does not say how wide it is.
        chunks_loss: whether logits are never whole.
    """

    config: TrainConfig
    ranks: Ranks
    source: ModelSource
    lora: Lora | None
    precision: Precision
    tokenizer: Tokenizer
    vocab_size: int
    recipe: Recipe
    sources: tuple[list[Source], list[Source]]
    packed: bool
    why_padded: str
    sizes: StepSizes | None
    chunks_loss: bool

    @property
    def shape(self) -> Shape:
        """What the data is made for."""
        return Shape(
            vocab_size=self.vocab_size,
            seq_length=self.recipe.seq_length,
            batch_size=self.recipe.batch_size,
            packed=self.packed,
            holds_out=self.config.eval_sequences > 0,
        )

    @property
    def pad_id(self) -> int:
        """What fills sequences up; nothing is learned from it."""
        end = self.tokenizer.end_of_document
        return 0 if end is None else end


def check_request(config: TrainConfig, ranks: Ranks) -> Request:
    """Find everything that can be wrong with a request, and what follows from it.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    logging.disable_progress_bar()  # the display of the run is the only one
    check_mesh(config, ranks.world_size)
    optimizer_arguments(config)
    check_trackers(config.report_to)
    if config.compile:
        check_compiler(ranks.device)
    precision = resolve_precision(config.precision, ranks.device)
    lora = parse_lora(config.lora, option="--lora") if config.lora else None
    if lora is not None:
        check_precision(lora, precision, option="--lora")
    source = find_model(config.model, seq_length=config.seq_length or 2, trust_remote_code=config.trust_remote_code)
    recipe = recipe_for(
        config,
        positions=source.max_seq_length,
        world_size=ranks.dp_world_size,
        per_step=per_step_before(config),
    )
    sources = find_all(config, without=[config.out, config.cache_folder])
    if config.plan not in ("", AUTO) and ranks.is_first:
        Plan.read(config.plan)  # is one
    if config.resume and config.resume != RESUME_AUTO:
        resolve(config.resume)  # is there, and is one
    tokenizer = tokenizer_for(source.folder, vocab_size=source.vocab_size, trust_remote_code=config.trust_remote_code)
    vocab_size = vocabulary_for(tokenizer, source.vocab_size, multiple=config.pad_vocab_to)
    packed, why_padded = packing_of(config.packing, source)
    sizes = step_sizes(
        source.config,
        vocab_size=vocab_size,
        batch_size=recipe.batch_size,
        seq_length=-(-recipe.seq_length // config.cp),
        itemsize=ITEMSIZES[precision],
    )
    chunks_loss = chunks_loss_of(config, source, sizes)
    if ranks.is_first:
        _check_out(config, source)
    return Request(
        config=config,
        ranks=ranks,
        source=source,
        lora=lora,
        precision=precision,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        recipe=recipe,
        sources=sources,
        packed=packed,
        why_padded=why_padded,
        sizes=sizes,
        chunks_loss=chunks_loss,
    )


def packing_of(asked: str, source: ModelSource) -> tuple[bool, str]:
    """Decide whether rows are packed, and say why not where that was left to the run.

    Raises:
        ConfigError: they are to be, and the model would let them see each other.
    """
    if asked == OFF:
        return False, ""
    why = why_not_isolated(source.config, source.model_class)
    if why is not None and asked == ON:
        raise ConfigError(f"--packing on: {why}. Use --packing off, which pads.")
    return why is None, why or ""


def chunks_loss_of(config: TrainConfig, source: ModelSource, sizes: StepSizes | None) -> bool:
    """Decide whether logits are never whole.

    Raises:
        ConfigError: they are not to be, and the model's class is not known to allow that.
    """
    if config.chunked_loss == ON:
        check_chunkable(source.model_class)
    can = is_known(source.model_class, Feature.CHUNKED)
    is_large = sizes is not None and sizes.logits_are_largest
    return config.chunked_loss == ON or (config.chunked_loss == AUTO and can and is_large)


def _check_out(config: TrainConfig, source: ModelSource) -> None:
    """Refuse a folder that cannot be written, before hours of training; nothing that is in it changes."""
    if source.folder is not None and source.folder.resolve() == config.out.resolve():
        raise ConfigError(f"--out {str(config.out)!r} is the folder of --model, which it would overwrite. Use another.")
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.out):
            pass
        for name in (
            METRICS_NAME,
            TRACE_NAME,
            RUN_NAME,
            PAGE_NAME,
            *((PLAN_NAME,) if config.plan else ()),
            *MODEL_FILES,
        ):
            file = check_own(config.out / name)
            if file.exists():
                with file.open("r+b"):
                    pass
    except OSError as error:
        where = error.filename if error.filename not in (None, str(config.out)) else ""
        raise ConfigError(
            f"--out {str(config.out)!r} cannot be written: {error.strerror}{where and f' ({where})'}. Use another."
        ) from error
