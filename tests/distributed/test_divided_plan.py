"""What a plan says of a model that ranks divide is what ranks have and send: bytes of state, and of each collective."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import penstock
from penstock.blueprint import request_for
from penstock.build import build
from penstock.config import Placement
from penstock.engine.unit.dtensor import divided_over, is_divided
from penstock.planner import Plan, plan, simulated_mesh
from penstock.planner.simulation.program import Program
from penstock.planner.simulation.simulate import Setup, simulate
from penstock.runtime.collectives import Collectives
from tests.distributed import test_volume
from tests.distributed.test_tensor_parallel import Model, parallelize
from tests.lib.engines import ON_CPU
from tests.lib.planning import desktop
from tests.lib.ranks import run_ranks
from tests.lib.streams import separate

VOCABULARY = 12
CELL_BYTES = {"device": 512, "cpu": 4096}  # a tier gives no less
Counts = Mapping[Any, int]

#: Of each operation its name here, and whether what it takes is the whole buffer, or what it gives.
COLLECTIVES = {
    "all_reduce": ("all_reduce", True),
    "reduce_scatter_tensor": ("reduce_scatter", True),
    "all_gather_into_tensor": ("all_gather", False),
}


class Recorder(TorchDispatchMode):
    """Counts the collectives of DTensors in a step for real."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if DTensor in types:
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and (found := COLLECTIVES.get(func._overloadpacket.__name__)):
            name, takes_all = found
            self.counts[name] += 1
            self.nbytes[name] += (args[0] if takes_all else out).nbytes
        return out


def loss_of(output: Tensor) -> Tensor:
    return output.float().mean()


def batch() -> Tensor:
    return torch.arange(16).view(2, 8) % VOCABULARY


def of_program(program: Program, *, model: bool) -> tuple[Counts, Counts]:
    """How many collectives the last step has, and of how many bytes: the model's own, or the engine's."""
    found = test_volume.of_program(program, of_model=model)
    nbytes: Counter[Any] = Counter()
    for (name, dimension), count in found["bytes"].items():
        nbytes[name if model else (name, dimension)] += count
    return found["counts"], dict(nbytes)


def formula(model: nn.Module, shards: int, cell_bytes: int) -> dict[str, int]:
    """Bytes of state on a rank in bf16: of a unit, slots of this rank's elements in steps of 256, to shards of 256.

    A tier gives each kind of a unit a multiple of some bytes.
    """
    numels: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        numel = parameter.numel()
        if is_divided(parameter):
            for line in divided_over(parameter):
                assert numel % len(line) == 0
                numel //= len(line)
        unit = ".".join(name.split(".")[:2]) if name.startswith("blocks") else ""
        numels[unit] += -(-numel // 256) * 256
    own = [-(-numel // (256 * shards)) * 256 for numel in numels.values()]
    sizes = {"param": 2, "grad": 2, "master": 2, "exp_avg": 4, "exp_avg_sq": 4}
    return {kind: sum(-(-size * n // cell_bytes) * cell_bytes for n in own) for kind, size in sizes.items()}


def each_rank(rank: int, tp: int, kind: str, placed: Mapping[str, Any], planned: str) -> dict[str, Any]:
    shards = torch.distributed.get_world_size() // tp
    mesh = init_device_mesh("cpu", (shards, tp), mesh_dim_names=("dp_shard", "tp"))
    model = parallelize(Model(VOCABULARY), mesh["tp"], kind)
    expected, taken = formula(model, shards, 1), formula(model, shards, CELL_BYTES["cpu" if placed else "device"])
    placement = Placement(**placed)
    request = request_for(model, placement=placement, units=(type(model.blocks[0]),))
    ranks = Collectives.from_mesh(mesh, sharded=True)
    optimizer = build(model, torch.optim.AdamW(model.parameters()), request, ranks, separate())
    state = state_of(optimizer)
    for _ in range(2):  # the first one learns the order
        ranks.counts.clear()
        with Recorder() as recorder:
            optimizer.backward(loss_of(model(batch())))
        optimizer.step()
        optimizer.zero_grad()
    real = {"counts": dict(recorder.counts), "bytes": dict(recorder.nbytes)}
    issued = {"counts": dict(ranks.counts), "bytes": dict(ranks.counts.nbytes)}
    optimizer.close()
    meant = parallelize(Model(VOCABULARY), mesh["tp"], kind)
    setup = Setup(meant, torch.optim.AdamW, batch, grid=ranks.grid, back_end="threads")
    program = simulate(setup, request).program
    meant = parallelize(Model(VOCABULARY), mesh["tp"], kind)
    units, chosen = (type(model.blocks[0]),), Plan.from_json(planned)
    as_planned = penstock.prepare(
        meant, torch.optim.AdamW(meant.parameters()), mesh=mesh, units=units, placement="auto", plan=chosen
    )
    as_planned.backward(loss_of(meant(batch())))
    as_planned.step()
    planned_state = state_of(as_planned)
    as_planned.close()
    return {
        "as planned": planned_state,
        "expected": expected,
        "taken": taken,
        "state": state,
        "model": (real["counts"], real["bytes"]),
        "simulated": of_program(program, model=True),
        "engine": (issued["counts"], issued["bytes"]),
        "simulated engine": of_program(program, model=False),
    }


def state_of(optimizer: penstock.Optimizer) -> dict[str, int]:
    state: Counter[str] = Counter()
    for row in optimizer.locations().rows:
        state[row.kind] += row.nbytes
    return {kind: nbytes for kind, nbytes in state.items() if kind != "staging"}


def planned(tp: int, shards: int, kind: str, placed: Mapping[str, Any]) -> Plan:
    """Plan in one process."""
    mesh = {"dp_shard": shards, "tp": tp}
    with simulated_mesh(mesh) as there:
        return plan(
            lambda: parallelize(Model(VOCABULARY), there["tp"], kind),
            torch.optim.AdamW,
            batch,
            machine=desktop(),
            mesh=mesh,
            placement=Placement(**placed),
            units=(type(Model(VOCABULARY).blocks[0]),),
        )


@pytest.mark.parametrize(
    ("world_size", "tp", "kind", "placed"), [(2, 2, "sequence", ON_CPU), (4, 2, "plain", {})], ids=["2", "4"]
)
def test_a_plan_has_the_bytes_of_ranks_and_a_simulation_their_collectives(
    world_size: int, tp: int, kind: str, placed: dict[str, Any]
) -> None:
    chosen = planned(tp, world_size // tp, kind, placed)
    assert chosen.mesh == {"dp_replicate": 1, "dp_shard": world_size // tp, "tp": tp}
    found = {kind: sum(tiers.values()) for kind, tiers in chosen.kind_bytes.items() if kind != "activations"}
    for of_rank in run_ranks(each_rank, world_size, tp, kind, placed, chosen.to_json()):
        state, expected = of_rank["state"], of_rank["expected"]
        assert state == of_rank["as planned"] == expected
        taken = of_rank["taken"]
        optimizer = taken["master"] + taken["exp_avg"] + taken["exp_avg_sq"]
        assert found == {"params": taken["param"], "grads": taken["grad"], "optimizer": optimizer}
        assert of_rank["model"][0]  # there are some
        assert of_rank["simulated"] == of_rank["model"]
        assert of_rank["simulated engine"] == of_rank["engine"]
