"""An average of the parameters, beside the training state."""

from contextlib import AbstractContextManager
from functools import partial

from penstock.config import TierName, average_kind, parse_tier
from penstock.engine.engine import check_at_rest
from penstock.errors import ConfigError
from penstock.optimizer import Optimizer
from penstock.runtime.modes import EngineBlock, engine_entry


class EMA:
    """An exponential moving average of the trained parameters: fp32, sharded as they are, on any tier.

    It begins with the parameters as they are, at master precision, and `update` has it follow them:
    `average = decay * average + (1 - decay) * parameter`, as `torch.optim.swa_utils.get_ema_multi_avg_fn` does, with
    the same bits at every stage, placement, tier and world size. It takes 4 bytes for each trained parameter of this
    rank's shard; `optimizer.locations()` lists them as `ema`. Parameters that the optimizer does not train are what
    they are, and so are buffers (`AveragedModel(use_buffers=False)`).

    `optimizer.save` keeps it and `optimizer.load` brings it back, at any world size, stage and tier: make it before
    `load`. From a checkpoint without one it begins with the loaded parameters, and a warning says so.
    `optimizer.close` gives it back.

    Arguments:
        optimizer: what `penstock.prepare` returned. Collective: every rank makes the same averages, in one order.
        decay: how much of the average stays at each update, from 0 to 1. It may be set between updates.
        tier: where the average rests, and is updated: `"device"`, `"cpu"`, or `"nvme"`, which needs
            `Placement(nvme_path=...)`.
        name: tells several averages of one optimizer apart: kind `ema.<name>` in reports and checkpoints.

    Raises:
        ConfigError: an argument is not as above, the name is taken, or no parameter is trained. Nothing has changed.
        MemoryBudgetError, NvmeError: there is no room for it. Nothing has changed.
        EngineError: closed; inside forward, backward, `gathered` or `applied`.

    Example:
        >>> ema = penstock.EMA(optimizer, decay=0.999)  # doctest: +SKIP
        >>> for batch in loader:  # doctest: +SKIP
        ...     optimizer.backward(model(**batch).loss)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     ema.update()
        >>> with ema.applied():  # doctest: +SKIP
        ...     evaluate(model)
    """

    @engine_entry
    def __init__(self, optimizer: Optimizer, decay: float = 0.999, *, tier: TierName = "cpu", name: str = "") -> None:
        _check(optimizer, name)
        where = parse_tier(tier, what="tier")
        self.decay = decay
        self._optimizer = optimizer
        self._kind = average_kind(name)
        engine = optimizer._open("EMA")
        with engine.turn("EMA"):
            with optimizer._together("EMA") as (_, facts):
                optimizer._open("EMA", whole=True, writes=True)
                check_at_rest("EMA", engine)
                engine.averages.check_new(self._kind)
                facts.update({"tier": where.value, "name": name, "decay": self.decay})
                engine.access.finish()
            engine.averages.add(self._kind, where)

    @property
    def decay(self) -> float:
        """How much of the average stays at each update, from 0 to 1."""
        return self._decay

    @decay.setter
    def decay(self, value: float) -> None:
        self._decay = _fraction(value)

    @engine_entry
    def update(self) -> None:
        """Have the average follow the parameters: called after `step`. Collective.

        It follows the updates of that step, on whichever stream they run, and the next step follows it: with
        `overlap="forward"` nothing waits for it. A step that was skipped has changed no parameter, and the average
        follows all the same; ask `StepResult.skipped`.

        Raises:
            EngineError: closed; inside forward, backward, `gathered` or `applied`; or ranks have another decay. Nothing
                has changed.
        """
        engine = self._optimizer._open("EMA.update")
        with engine.turn("EMA.update"):
            with self._optimizer._together("EMA.update") as (_, facts):
                self._optimizer._open("EMA.update", whole=True)
                check_at_rest("EMA.update", engine)
                facts.update({"name": self._kind, "decay": self.decay})
            engine.averages.update(self._kind, self.decay)

    @engine_entry
    def applied(self) -> AbstractContextManager[None]:
        """Show the average in the model inside a `with` block, and the parameters again after it. Collective.

        The two change places, so it takes no memory; after the block both have the bits that they had, also where an
        exception ends it. Inside, the model computes with the average in the compute dtype: forward, `generate`,
        `optimizer.gathered()` with `state_dict` and `save_pretrained` in it, `full_param`. Training is refused by name:
        backward, `step`, `save`, `load`, whatever sets parameters or states, and `close`.

        Raises:
            EngineError: closed; inside forward, backward, `gathered` or another `applied`; a forward waits for its
                backward. Nothing has changed.

        Example:
            >>> with ema.applied(), optimizer.gathered():  # doctest: +SKIP
            ...     model.save_pretrained("averaged")
        """
        optimizer = self._optimizer
        with optimizer._together("EMA.applied") as (engine, facts):
            optimizer._open("EMA.applied", whole=True, writes=True)
            check_at_rest("EMA.applied", engine)
            engine.averages.check_free()
            facts["name"] = self._kind
            engine.access.finish()  # inside the meeting: an update that has failed here stops every rank
        return EngineBlock(engine.averages.applied(self._kind), partial(engine.turn, "EMA.applied"))


def _check(optimizer: object, name: object) -> None:
    """Refuse an optimizer that is not ours, and a name that is none."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"EMA({type(optimizer).__name__}): give it the optimizer that penstock.prepare() returned.")
    if name != "" and not (isinstance(name, str) and name.isidentifier()):
        raise ConfigError(f"EMA(name={name!r}): use letters, digits and underscores.")


def _fraction(value: object) -> float:
    """Read a decay."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"EMA: decay={value!r}. Use a number from 0 to 1.")
    return float(value)
