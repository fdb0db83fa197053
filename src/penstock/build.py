"""`build`: draws the blueprint of a request, and has it built on given ranks and streams.

1. Draw the blueprint (`blueprint.py`), hold it against the memory there is, and have all ranks compare theirs: those of
   a host together as well (`hosts.py`).
2. Build it (`construct.py`).
"""

import logging
import warnings
from collections.abc import Mapping

import torch
from torch import nn

from penstock import checks
from penstock.adopt import Adopter
from penstock.blueprint import Request, draw_blueprint
from penstock.construct import construct
from penstock.errors import CheckpointError, ConfigError
from penstock.hosts import check_hosts
from penstock.machine.border import crossing
from penstock.machine.collectives import Ranks
from penstock.machine.streams import Streams
from penstock.optimizer import Optimizer
from penstock.supply import Supply

_logger = logging.getLogger("penstock")


@crossing
def build(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    request: Request,
    ranks: Ranks,
    streams: Streams,
    supply: Supply | None = None,
) -> Optimizer:
    """Draw the blueprint and build it, for given ranks and streams. Collective.

    Memory, files and first values are those of this machine, unless there is another supply.
    """
    supply = supply or Supply()
    with ranks.council.together("prepare()", ConfigError) as facts:  # before any other collective
        blueprint = draw_blueprint(model, optimizer, request, ranks.grid, streams.reach)
        casts = checks.check_casts(blueprint.specs, request.compute_dtype, is_said=request.precision_is_said)
        # When all of it is known: memory that is too small is found before anything is taken, not halfway.
        budget = supply.check(blueprint, model, ranks.grid, streams.reach, streams.device)
        if ranks.world_size > 1:
            facts.update(blueprint.facts(model, ranks.grid))
    check_hosts(ranks.council, budget)
    if casts and ranks.council.is_first:
        _logger.warning("%s", casts)
    if optimizer is not None:
        warn_of_unowned(model, blueprint.groups)
    # Now, when all ranks are here and nothing has moved: one that dies later leaves none waiting for a group.
    of_saves = ranks.council.another(error=CheckpointError, advice="Checkpoints that were whole before still are. ")
    prepared, lasting = construct(blueprint, model, optimizer, ranks, streams, of_saves, supply)
    engine = prepared._engine
    assert engine is not None
    engine.adopter = Adopter(blueprint, lasting)
    return prepared


def warn_of_unowned(model: nn.Module, owned: Mapping[nn.Parameter, int]) -> None:
    """Warn once, and name the trainable parameters which the optimizer does not own."""
    names = checks.unowned(model, owned)
    if names:
        warnings.warn(
            f"The optimizer does not own {len(names)} trainable parameters: {', '.join(names)}. They are kept, never "
            "updated, and their gradients are dropped.",
            stacklevel=7,  # the call of prepare()
        )
