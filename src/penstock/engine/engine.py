"""The parts of one engine, and how they end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from penstock._native import Pool
from penstock.config import Options
from penstock.engine.access import Access
from penstock.engine.gather import Gatherer
from penstock.engine.hooks import Hooks
from penstock.engine.reduce import Reducer
from penstock.engine.step import Stepper
from penstock.engine.unit import Unit
from penstock.errors import EngineError
from penstock.kinds import GRAD, PARAM
from penstock.machine.collectives import Ranks
from penstock.machine.streams import Streams
from penstock.tiers.store import Store


@dataclass(frozen=True)
class Origin:
    """What a parameter was before `prepare`."""

    dtype: torch.dtype
    device: torch.device


@dataclass
class Engine:
    """Everything that `prepare` built. Parts know each other only as far as their constructors say.

    Attributes:
        owned_frozen: parameters that the optimizer was given and that do not require gradients.
        restore_model: undoes what `prepare` set on the model beside its parameters and hooks.
    """

    units: Sequence[Unit]
    store: Store
    ranks: Ranks
    streams: Streams
    pool: Pool
    gatherer: Gatherer
    reducer: Reducer
    stepper: Stepper
    hooks: Hooks
    access: Access
    options: Options
    origins: dict[nn.Parameter, Origin]
    owned_frozen: Sequence[nn.Parameter]
    restore_model: Callable[[], None]

    def at_rest(self, unit_name: str, kind: str) -> bool:
        """Whether a cell has no movement or update under way."""
        unit = next((unit for unit in self.units if unit.name == unit_name), None)
        if unit is None:  # staging
            return all(u.trained is None or u.trained.updated.done() for u in self.units)
        if kind == PARAM:
            return unit.published.done() and (unit.trained is None or unit.trained.updated.done())
        assert unit.trained is not None
        return unit.trained.gradient.ready.done() if kind == GRAD else unit.trained.updated.done()

    def check_frozen(self) -> None:
        """Refuse parameters that were unfrozen after `prepare`: they have no optimizer state."""
        for unit in self.units:
            if unit.trained is None:
                for name, parameter in zip(unit.spec.names, unit.spec.parameters, strict=True):
                    if parameter.requires_grad and any(parameter is p for p in self.owned_frozen):
                        raise EngineError(
                            f"Parameter '{name}' was frozen when the model was prepared and requires a gradient now. "
                            "Close the optimizer and prepare again with the new set of trained parameters."
                        )

    def close(self, *, keep_params: bool) -> None:
        """Finish work, take hooks off, restore the parameters, give everything back."""
        self.access.finish()
        self.hooks.abandon_backward()
        self.hooks.remove()
        self.restore_model()
        for parameter, origin in self.origins.items():
            if keep_params:
                parameter.data = self.access.exact_param(parameter).to(device=origin.device, dtype=origin.dtype)
            else:
                parameter.data = torch.empty(0, dtype=origin.dtype, device=origin.device)
        self.reducer.buffers.clear()
        self.streams.close()
        self.store.close()
        for unit in self.units:
            unit.drop()
        self.pool.close()
