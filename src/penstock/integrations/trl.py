"""TRL's trainers on Penstock: whole parameters for generation, reference models that follow, and what is refused.

`trainer_class(GRPOTrainer, placement=...)` is all that a user writes (`penstock.integrations.transformers`). TRL asks
an object of each trainer, its `DistributedBackend`, for whole parameters, and that does nothing unless DeepSpeed or
FSDP shards the model. `adopt` puts `WholeParameters` in its place. No class or function of TRL's is changed.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
import trl
from torch import nn
from trl import SyncRefModelCallback

from penstock import Optimizer
from penstock.errors import ConfigError, EngineError
from penstock.integrations import _private
from penstock.integrations._private.trl import TESTED
from penstock.integrations.engine_internals import batches
from penstock.integrations.generation import generating, move_away
from penstock.integrations.transformers.accelerator import TrainerAccelerator

#: What is gathered at once where parameters are read one after the other.
GATHER_BYTES = 256 << 20

_private.warn_untested("TRL", trl.__version__, TESTED)


def check_arguments(args: Any) -> None:
    """Refuse what cannot be kept, before anything is made.

    Arguments:
        args: an `SFTConfig`, `DPOConfig`, `GRPOConfig` ...

    Raises:
        ConfigError: names the argument, and what to use in its place.
    """
    if getattr(args, "activation_offloading", False):
        raise ConfigError(
            "activation_offloading=True: TRL's hooks on what autograd saves and Penstock's undo each other. Leave it "
            "out, and use placement=penstock.Placement(activations='cpu'), which does the same."
        )
    batches_alone = getattr(args, "use_transformers_continuous_batching", False)
    if batches_alone and not args.ds3_gather_for_generation and args.world_size > 1:
        raise ConfigError(
            "ds3_gather_for_generation=False with use_transformers_continuous_batching=True: ranks batch their prompts "
            "differently, so none can gather a unit together. Leave out one of the two."
        )


def begin(trainer: Any) -> None:
    """Refuse what cannot be kept, and have the model placed where TRL's constructor runs it.

    Arguments:
        trainer: one of TRL's that is being made, and has its `args` and a `TrainerAccelerator`.

    Raises:
        ConfigError: an argument that cannot be kept.
    """
    check_arguments(trainer.args)
    precompute = getattr(trainer, "_precompute_ref_logps", None)
    if precompute is not None:
        trainer._precompute_ref_logps = beside_reference(trainer, precompute)


def adopt(trainer: Any) -> None:
    """Have a trainer of TRL's that is made ask Penstock for whole parameters. Safe to repeat.

    Arguments:
        trainer: whose `accelerator` is a `TrainerAccelerator`. Its objects are changed, no class.
    """
    accelerator: TrainerAccelerator = trainer.accelerator
    whole = WholeParameters(trainer)
    if hasattr(trainer, "_dist"):
        trainer._dist = whole
    if "split_between_processes" not in vars(accelerator):
        split: Any = whole.between(accelerator.split_between_processes)
        accelerator.split_between_processes = split
    engine = getattr(trainer, "vllm_generation", None)
    if engine is not None and not isinstance(engine._dist, WholeParameters):
        engine._dist = whole
        beside_vllm(engine, whole)
    teacher = getattr(trainer, "teacher_model", None)
    if teacher is not None and "compute_loss" not in vars(trainer):
        trainer.compute_loss = beside_head(accelerator, teacher, trainer.compute_loss)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, SyncRefModelCallback):
            follow: Any = partial(sync_reference, accelerator)
            callback.sync_target_model = follow


class WholeParameters:
    """What TRL asks for whole parameters, in the place of its `DistributedBackend`: neither DeepSpeed nor FSDP.

    Arguments:
        trainer: whose model it is. Before that is prepared its parameters are whole, and there is nothing to do.
    """

    zero_stage = 0
    fsdp_version = None
    is_zero3 = False
    is_fsdp = False

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._stream: dict[nn.Parameter, list[nn.Parameter]] = {}
        self._shown: list[nn.Parameter] = []
        self._open = ExitStack()

    def optimizer(self) -> Optimizer | None:
        """Find what the model was prepared as; `None` before that."""
        return find_optimizer(self._trainer.accelerator, self._trainer.model)

    @contextmanager
    def summon_full_params(self, module: nn.Module, **rest: Any) -> Iterator[None]:
        """Prepare the model for generation, in a `with` block. Collective.

        Arguments:
            module: the trainer's model.
            rest: what FSDP's function of this name takes.

        Raises:
            EngineError: continuous batching at several ranks, and the model does not fit whole.
        """
        del rest
        trainer, optimizer = self._trainer, self.optimizer()
        if optimizer is None:
            yield
            return
        accelerator, args = trainer.accelerator, trainer.args
        wanted = getattr(args, "ds3_gather_for_generation", True)
        with generating(accelerator, optimizer, module, whole=wanted) as is_whole:
            if not is_whole and getattr(trainer, "use_transformers_continuous_batching", False):
                check_alone(accelerator, "use_transformers_continuous_batching=True")
            yield

    def between(self, split: Callable[..., Any]) -> Callable[..., Any]:
        """Prepare the model for generation where callbacks of TRL's divide prompts between ranks to answer them.

        Arguments:
            split: `Accelerator.split_between_processes`, which is all that those callbacks ask for.
        """

        @contextmanager
        def split_between_processes(inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
            accelerator, optimizer = self._trainer.accelerator, self.optimizer()
            with ExitStack() as stack:
                if optimizer is not None:
                    is_whole = stack.enter_context(generating(accelerator, optimizer, self._trainer.model))
                    if not is_whole and len(inputs) % accelerator.num_processes:
                        check_alone(accelerator, f"{len(inputs)} prompts for {accelerator.num_processes} ranks")
                yield stack.enter_context(split(inputs, apply_padding))

        return split_between_processes

    @contextmanager
    def gather_params(self, params: Iterable[nn.Parameter]) -> Iterator[None]:
        """Show whole parameters in a `with` block, to be read, or merged with adapters and unmerged. Collective."""
        wanted, optimizer = list(params), self.optimizer()
        if optimizer is None:
            yield
        elif len(wanted) == 1 and wanted[0] in self._stream:
            self._show(optimizer, self._stream[wanted[0]])
            yield
        elif len(wanted) == 1:
            with optimizer.gathered(wanted):
                yield
        else:
            with optimizer.gathered(wanted, modify=True), restored(wanted):
                yield

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Have parameters that are asked for one by one, in order, gathered many at once, in a `with` block."""
        order = dict.fromkeys(self._trainer.model.parameters())
        self._stream = {p: batch for batch in batches(order, GATHER_BYTES) for p in batch}
        try:
            yield
        finally:
            self._stream, self._shown = {}, []
            self._open.close()

    def _show(self, optimizer: Optimizer, batch: list[nn.Parameter]) -> None:
        if batch is not self._shown:
            self._open.close()  # one batch is whole at a time
            self._open.enter_context(optimizer.gathered(batch))
            self._shown = batch


@contextmanager
def restored(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Put parameters back bit for bit after a `with` block: adding an adapter and subtracting it again rounds.

    Takes host memory for the frozen ones, which are what adapters are merged into.
    """
    kept = [(parameter, parameter.detach().to("cpu", copy=True)) for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in kept:
                parameter.copy_(values)


def beside_vllm(engine: Any, whole: WholeParameters) -> None:
    """Have state make room while vLLM is awake, and weights reach it some units at a time.

    Arguments:
        engine: a trainer's `vllm_generation`. A vLLM that sleeps between generations wakes in its `sync_weights` and
            sleeps again in its `generate`; one that is awake all the time, or a server, has memory of its own.
        whole: gathers the weights that are sent.
    """
    takes_turns = engine.mode == "colocate" and engine.enable_sleep_mode
    sync: Callable[..., Any] = engine.sync_weights
    generate: Callable[..., Any] = engine.generate

    def sync_weights(*args: Any, **kwargs: Any) -> Any:
        optimizer = whole.optimizer()
        if takes_turns and optimizer is not None:
            move_away(optimizer)
        with whole.streaming():
            return sync(*args, **kwargs)

    def generate_and_return(*args: Any, **kwargs: Any) -> Any:
        try:
            return generate(*args, **kwargs)
        finally:
            optimizer = whole.optimizer()
            if takes_turns and optimizer is not None:
                optimizer.reload_states()

    engine.sync_weights = sync_weights
    engine.generate = generate_and_return


def beside_reference(trainer: Any, precompute: Callable[..., Any]) -> Callable[..., Any]:
    """Have a model prepared for its training by the time that its own words are taken as a reference's, before it."""

    @wraps(precompute)
    def precompute_ref_logps(*args: Any, **kwargs: Any) -> Any:
        if trainer.ref_model is None and find_optimizer(trainer.accelerator, trainer.model) is None:
            trainer.create_optimizer()
            prepared = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
            trainer.model_wrapped, trainer.optimizer = prepared
        return precompute(*args, **kwargs)

    return precompute_ref_logps


def beside_head(accelerator: TrainerAccelerator, teacher: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Have the weights of a teacher's head there while a loss is computed, which reads them outside of its forward."""

    @wraps(compute)
    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        with accelerator.optimizer_of(teacher).gathered(teacher.get_output_embeddings().parameters()):
            return compute(*args, **kwargs)

    return compute_loss


def sync_reference(accelerator: TrainerAccelerator, model: nn.Module, target: nn.Module, alpha: float) -> None:
    """Move a reference model towards the trained one: `target = (1 - alpha) * target + alpha * model`. Collective.

    What TRL does with both whole, some parameters at a time.

    Arguments:
        accelerator: that prepared them.
        model: the trained one.
        target: the reference.
        alpha: how far, between 0 and 1.
    """
    source, reference = accelerator.optimizer_of(model), accelerator.optimizer_of(target)
    of = dict(zip(target.parameters(), model.parameters(), strict=True))
    for batch in batches(of, GATHER_BYTES):
        read = [of[parameter] for parameter in batch]
        with source.gathered(read), reference.gathered(batch, modify=True), torch.no_grad():
            for parameter, towards in zip(batch, read, strict=True):
                parameter.mul_(1.0 - alpha).add_(towards, alpha=alpha)


def find_optimizer(accelerator: TrainerAccelerator, model: nn.Module) -> Optimizer | None:
    """Find what a model is prepared as; `None` for one that is not, or not any more."""
    return accelerator.optimizer_of(model) if accelerator.is_prepared(model) else None


def check_alone(accelerator: TrainerAccelerator, what: str) -> None:
    """Refuse, except on one rank alone, what has ranks run different numbers of forwards of a model that is not whole.

    Raises:
        EngineError: on every rank.
    """
    if accelerator.num_processes > 1:
        raise EngineError(
            f"{what}: ranks run different numbers of forwards, and the model does not fit whole beside what generation "
            "needs. Use a placement that leaves more of the device free, or leave it out."
        )
