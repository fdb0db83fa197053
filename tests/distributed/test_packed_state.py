"""Gathers that carry codes, beside everything that shows, keeps and moves state; and the bytes that they carry."""

import copy
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import penstock
from penstock.blueprint import draw_blueprint
from penstock.engine.forward_backward.gather import QuantizedGather
from penstock.memory_budget import PACKED, budget_of
from penstock.runtime.collectives import Collectives
from tests.distributed.test_packed import carried, watching
from tests.lib.engines import prepare_on
from tests.lib.streams import inline, separate
from tests.parity.rows import Arithmetic, Movement, Net, batches, loss_of, make_model, prepared
from tests.support import run_ranks

PLAIN = Movement().but(tile_bytes=4096, gather_format="int8")


def packing_of(optimizer: penstock.Optimizer) -> QuantizedGather:
    return optimizer._engine.gatherer.packing


def steps(rank: int, look: bool, persistent_bytes: int) -> list[Tensor]:
    """Two steps; with `look`, values are looked at wherever that is allowed."""
    how = PLAIN.but(persistent_bytes=persistent_bytes)
    model, optimizer = prepared(Arithmetic(), how, separate())
    exact = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
    seen: list[Tensor] = []

    def check() -> None:
        with optimizer.gathered():
            with optimizer.gathered([model.blocks[0].up.weight]):
                pass
            for name, p in model.named_parameters():
                assert torch.equal(p, exact[name]), name

    if look:
        model.blocks[1].register_forward_pre_hook(lambda module, inputs: check())
        model.blocks[0].register_forward_hook(lambda module, inputs, made: check())
    for ((batch, other),) in batches(2, 1)[:2]:
        exact = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
        if look:
            check()
            with optimizer.gathered(modify=True):
                pass
        with watching(model) as used:
            loss = loss_of(model, (batch, other)[rank])
        for name, value in used.items():
            assert torch.equal(value, carried(exact[name], "int8")), name
        optimizer.backward(loss)
        gatherer = optimizer._engine.gatherer
        assert not gatherer._lingering
        assert gatherer.live_bytes == sum(u.nbytes for u in optimizer._engine.context.units if u.spec.persistent)
        if look:
            check()
        seen.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    seen += [optimizer.full_param(p) for p in model.parameters()]
    optimizer.close()
    return seen


def looks(rank: int) -> list[bool]:
    found = []
    for persistent_bytes in (0, 1 << 12):
        ours, theirs = (steps(rank, look, persistent_bytes) for look in (False, True))
        found.append(all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)))
    return found


def test_looks_see_exact_values_and_change_nothing() -> None:
    assert run_ranks(looks, 2) == [[True, True]] * 2


def writes(rank: int) -> None:
    model, optimizer = prepared(Arithmetic(), PLAIN.but(persistent_bytes=1 << 12))
    weight, bias = model.blocks[0].up.weight, model.blocks[0].up.bias
    for value in (0.3, 0.7):
        with optimizer.gathered([weight, bias], modify=True), torch.no_grad():
            weight[3, 4] = value
            bias[5] = value
        exact = optimizer.full_param(weight)
        assert exact[3, 4] == torch.tensor(value)
        with watching(model) as used:
            loss_of(model, batches(2, 1)[0][0][rank])
        assert torch.equal(used["blocks.0.up.weight"], carried(exact, "int8"))
        assert torch.equal(used["blocks.0.up.bias"], carried(optimizer.full_param(bias), "int8"))
    with optimizer.gathered():
        loss = loss_of(model, batches(2, 1)[0][0][rank])
    plain = make_model()
    with torch.no_grad():
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            p.copy_(optimizer.full_param(q))
    assert torch.equal(loss, loss_of(plain, batches(2, 1)[0][0][rank])), "inside of a block values are exact"
    optimizer.close()


def idioms(rank: int) -> None:
    """Of a model that stays gathered, with rounded values."""
    model, optimizer = prepared(Arithmetic(), PLAIN.but(persistent_bytes=1 << 20))
    for call in (model.state_dict, lambda: copy.deepcopy(model)):
        loss_of(model, batches(2, 1)[0][0][rank])
        with pytest.raises(penstock.EngineError, match=r"gather carried.*inside optimizer.gathered"):
            call()
        with optimizer.gathered():
            found = call()
            states = found if isinstance(found, dict) else found.state_dict()
            exact = {name: value.clone() for name, value in states.items()}
        for name, p in model.named_parameters():
            assert torch.equal(exact[name], optimizer.full_param(p))
    optimizer.close()


def test_idioms_never_give_rounded_values() -> None:
    run_ranks(idioms, 2)


def test_what_is_written_is_exact_and_then_carried() -> None:
    run_ranks(writes, 2)


class Coded(nn.Module):
    """A layer of codes with their scales, and a norm beside it, in the same unit as the scales."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Linear(64, 64, bias=False)
        self.codes.weight = nn.Parameter(torch.randint(-127, 127, (64, 64), dtype=torch.int8), requires_grad=False)
        self.codes.scale = nn.Parameter(torch.rand(64), requires_grad=False)
        self.codes.forward = lambda x: x @ (self.codes.weight * self.codes.scale[:, None]).T
        self.norm = nn.LayerNorm(64).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.codes(self.norm(x))


def frozen(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Coded(), nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False))
    given = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    optimizer = prepare_on(
        inline(), model, given, precision="fp32", options=penstock.Options(gather_format="fp8", tile_bytes=4096)
    )
    exact = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
    with watching(model) as used:
        optimizer.backward(model(torch.randn(3, 64) / 64).sum())
    optimizer.step()
    for name, value in used.items():
        is_block_of_codes = name.startswith("0.")
        expected = exact[name] if is_block_of_codes else carried(exact[name], "fp8")
        assert torch.equal(value, expected), name
        assert torch.equal(value, exact[name]) == is_block_of_codes
    optimizer.close()


def inferred(rank: int) -> None:
    model = make_model()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    handle = prepare_on(inline(), model, None, precision="fp32", options=penstock.Options(gather_format="int8"))  # type: ignore[arg-type]
    with watching(model) as used, torch.inference_mode():
        loss_of(model, batches(2, 1)[0][0][rank])
    for name, value in used.items():
        assert torch.equal(value, carried(values[name], "int8"))
    handle.close()
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())


def frozen_and_inferred(rank: int) -> None:
    frozen(rank)
    inferred(rank)


def test_frozen_units_are_carried_and_codes_with_their_scales_are_not() -> None:
    run_ranks(frozen_and_inferred, 2)


def checkpoints(rank: int) -> None:
    """Saved on a hybrid mesh, taken up over all ranks, in another stage, and without the format."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = prepared(Arithmetic(precision="bf16"), PLAIN, mesh=mesh)
    (of_ranks,) = batches(4, 1)[0]
    optimizer.backward(loss_of(model, of_ranks[rank]))
    optimizer.step()
    folder = [TemporaryDirectory().name if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    optimizer.save(folder[0])
    saved = [optimizer.full_param(p) for p in model.parameters()]
    optimizer.close()
    for how in (Movement(), Movement(1), Movement().but(gather_format="fp8")):
        other, reader = prepared(Arithmetic(precision="bf16"), how)
        reader.load(Path(folder[0]))
        assert all(torch.equal(a, reader.full_param(p)) for a, p in zip(saved, other.parameters(), strict=True))
        reader.close()


def test_checkpoints_have_exact_values() -> None:
    run_ranks(checkpoints, 4)


def unfreezing(rank: int) -> None:
    """A part of a frozen unit is trained from now on, and an average is shown."""
    model = make_model()
    model.blocks[0].requires_grad_(False)
    given = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    options = penstock.Options(gather_format="int8", tile_bytes=4096)
    optimizer = prepare_on(separate(), model, given, precision="fp32", options=options)
    (first,), (second,) = batches(2, 1)[:2]
    optimizer.backward(loss_of(model, first[rank]))
    optimizer.step()
    optimizer.zero_grad()
    before = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
    model.blocks[0].up.requires_grad_(True)
    optimizer.add_param_group({"params": model.blocks[0].up.parameters()})
    for name, p in model.named_parameters():
        assert torch.equal(optimizer.full_param(p), before[name]), name
    ema = penstock.EMA(optimizer, 0.5)
    with watching(model) as used:
        loss = loss_of(model, second[rank])
    assert all(torch.equal(value, carried(before[name], "int8")) for name, value in used.items())
    optimizer.backward(loss)
    optimizer.step()
    ema.update()
    after = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
    assert not torch.equal(after["blocks.0.up.weight"], before["blocks.0.up.weight"])
    with ema.applied(), torch.no_grad(), watching(model) as used:
        shown = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
        loss_of(model, first[rank])
    assert not torch.equal(shown["last.weight"], after["last.weight"])
    assert all(torch.equal(value, carried(shown[name], "int8")) for name, value in used.items())
    optimizer.close()


def test_units_that_change_and_averages_keep_exact_values() -> None:
    run_ranks(unfreezing, 2)


def wire_bytes(rank: int, name: str) -> dict[str, int]:
    """Bytes of the buffers that all-gathers fill in one step."""
    found: Counter[str] = Counter()
    issue = Collectives.all_gather

    def note(self: Collectives, full: Tensor, shard: Tensor, what: str = "", **rest: Any) -> Any:
        found[what] += full.nbytes
        return issue(self, full, shard, what, **rest)

    model, optimizer = prepared(Arithmetic(precision="bf16"), Movement().but(gather_format=name))
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(Collectives, "all_gather", note)
        with optimizer.trace(Path(folder, "trace.json")):
            optimizer.backward(loss_of(model, batches(2, 1)[0][0][rank]))
            optimizer.step()
        text = "".join(path.read_text() for path in Path(folder).iterdir())
    if rank == 0:  # who writes it
        assert (f"gather blocks.0 {name}" in text) == (name != "exact")
        assert (f"unpack blocks.0 {name}" in text) == (name != "exact")
    packing = packing_of(optimizer)
    kept = packing._free
    assert sum(size * len(ring) for size, ring in kept.items()) <= need(name)
    optimizer.offload_states()
    assert not kept
    optimizer.reload_states()
    optimizer.backward(loss_of(model, batches(2, 1)[0][0][rank]))
    optimizer.close()
    assert not packing._free
    return dict(found)


def need(name: str) -> int:
    """What `prepare` counts for packed buffers on a rank of two."""
    from penstock.blueprint import request_for
    from penstock.runtime.topology import Grid, Reach

    model, grid, reach = make_model(), Grid.first_of(2, sharded=True), Reach(aliases_host=True)
    request = request_for(model, options=penstock.Options(gather_format=name))  # type: ignore[arg-type]
    blueprint = draw_blueprint(model, torch.optim.AdamW(model.parameters()), request, grid, reach)
    return budget_of(blueprint, model, torch.device("cpu")).device.parts[PACKED]


def test_bytes_on_the_wire_are_those_of_the_formula() -> None:
    exact, _ = run_ranks(wire_bytes, 2, "exact")
    assert need("exact") == 0
    for name in ("int8", "fp8"):
        for packed in run_ranks(wire_bytes, 2, name):
            assert packed == {unit: nbytes * 260 // 512 for unit, nbytes in exact.items()}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_stages_are_refused(stage: int) -> None:
    model = Net()
    with pytest.raises(penstock.ConfigError, match=rf"gather_format='int8'\) with stage={stage}.*Use stage=3"):
        penstock.prepare(
            model,
            torch.optim.AdamW(model.parameters()),
            stage=stage,  # type: ignore[arg-type]
            options=penstock.Options(gather_format="int8"),
        )
    with pytest.raises(penstock.ConfigError, match=r"gather_format='int4'\): use one of 'exact', 'int8', 'fp8'"):
        penstock.Options(gather_format="int4")  # type: ignore[arg-type]


def test_one_rank_rounds_nothing() -> None:
    runs = []
    for options in ({}, {"gather_format": "int8"}):
        model, optimizer = prepared(Arithmetic(), Movement().but(**options), separate())
        loss = loss_of(model, batches(1, 1)[0][0][0])
        optimizer.backward(loss)
        optimizer.step()
        runs.append([loss, *(optimizer.full_param(p) for p in model.parameters())])
        optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
