"""What one rank refuses, all refuse, by name; and ranks that differ say in what, before anything has changed."""

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError, EngineError
from penstock.runtime.collectives import Collectives
from penstock.runtime.streams import FailedEvent
from tests.lib.engines import ON_CPU, assert_same_state, loss_of, prepared, state, train
from tests.lib.models import stack
from tests.lib.ranks import run_ranks
from tests.lib.refusals import said_by
from tests.lib.streams import inline

WIDTH = 16


def net(width: int = WIDTH, layers: int = 2) -> nn.Sequential:
    """Two layers that are trained, one that is frozen, and a buffer."""
    model = stack(WIDTH, width, *[WIDTH] * layers)
    model[-1].requires_grad_(False)
    model.register_buffer("scale", torch.ones(WIDTH))
    return model


# Refusals

NO_PARAMETER = "ConfigError: This is no parameter of the prepared model"
NO_STATE = "ConfigError: There is no optimizer state 'momentum'"
OTHER_SHAPE = "ConfigError: The value for '0.weight' has shape (16, 17)"


def refusals(rank: int, folder: Path) -> None:
    """Rank 1 alone refuses; both raise, and go on afterwards."""
    model, optimizer = prepared(net, inline)
    train(model, optimizer)
    weight, frozen = model[0].weight, model[-1].weight
    optimizer.backward(loss_of(model, 1))
    before = state(model, optimizer)
    grad, sparse, stranger = weight.grad, torch.eye(WIDTH).to_sparse(), nn.Parameter(torch.ones(2))
    second = rank == 1

    def set_grad(value: Tensor | None) -> None:
        weight.grad = value

    def fail(value: bool) -> None:
        optimizer._engine.hooks.backward.has_failed = value

    def hold(count: int) -> None:
        for unit in optimizer._engine.context.units:
            unit.holding.blocks += count

    def load_state() -> None:
        groups = [
            {**group, "params": list(range(number, number + len(group["params"])))}
            for number, group in enumerate(optimizer.param_groups)
        ]
        states = {0: {"momentum" if second else "exp_avg": torch.ones(WIDTH, WIDTH)}}
        optimizer.load_state_dict({"state": states, "param_groups": groups})

    unfreezing = lambda: frozen.requires_grad_(True), lambda: frozen.requires_grad_(False)
    by_hand = lambda: set_grad(sparse), lambda: set_grad(grad)
    inside, nothing = (lambda: hold(1), lambda: hold(-1)), (lambda: None, lambda: None)
    failed = lambda: fail(True), lambda: fail(False)
    wide = torch.ones(WIDTH, WIDTH + rank)
    of_rank = stranger if second else weight
    # What rank 1 does before and takes back after, what both call, and how rank 1's error begins.
    rows: list[tuple[tuple[Callable[[], object], Callable[[], object]], Callable[[], object], str]] = [
        (unfreezing, optimizer.step, "EngineError: Parameter '2.weight' was frozen when"),
        (by_hand, optimizer.step, "ConfigError: The value for '0.weight' is sparse"),
        (by_hand, lambda: optimizer.clip_grad_norm_(1.0), "ConfigError: The value for '0.weight' is sparse"),
        (failed, optimizer.step, "EngineError: The last backward did not finish"),
        (inside, optimizer.step, "EngineError: step() was called inside gathered()"),
        (inside, lambda: optimizer.save(folder), "EngineError: save() was called inside gathered()"),
        (nothing, lambda: optimizer.full_param(of_rank), NO_PARAMETER),
        (nothing, lambda: optimizer.full_state(weight, "momentum" if second else "exp_avg"), NO_STATE),
        (nothing, lambda: optimizer.set_full_grad(weight, wide), OTHER_SHAPE),
        (nothing, lambda: optimizer.set_full_state(weight, "exp_avg", wide), OTHER_SHAPE),
        (nothing, lambda: optimizer.gathered([of_rank]).__enter__(), NO_PARAMETER),
        (nothing, load_state, NO_STATE),
    ]
    for number, ((set_up, take_back), verb, text) in enumerate(rows):
        if second:
            set_up()
        said = said_by(verb)
        if second:
            take_back()
        assert said.startswith(text if second else "EngineError: Rank 1 of 2 failed in "), (number, said)
        assert text in said, (number, said)
    assert_same_state(state(model, optimizer), before)
    assert not optimizer.step().skipped
    if second:
        optimizer._engine.context.units[0].params.note_write(FailedEvent(EngineError("an update failed")))
    said = said_by(optimizer.close)
    if second:  # at once: it does not wait for the others
        assert said == "EngineError: an update failed"
    else:
        assert said.startswith("EngineError: Rank 0 of 2 hears nothing from another one in close()")
    assert all(p.numel() == 0 for p in model.parameters())


def test_a_refusal_on_one_rank_is_a_refusal_on_all_and_training_goes_on(tmp_path: Path) -> None:
    run_ranks(refusals, 2, tmp_path, fresh=True)


# Ranks that do different things


def differences(rank: int) -> None:
    model, optimizer = prepared(net, inline)
    first, second = model[0].weight, model[1].weight
    optimizer.backward(loss_of(model))
    before = state(model, optimizer)
    group = optimizer.param_groups[0]
    as_it_was = {key: value for key, value in group.items() if key != "params"}

    def step_with(**changes: Any) -> None:
        group.update(changes)
        try:
            optimizer.step()
        finally:
            group.update(as_it_was)

    ema = penstock.EMA(optimizer)
    ema.decay = 0.25 + rank / 4

    rows: list[tuple[Callable[[], object], str]] = [
        (ema.update, "Ranks differ in decay: rank 0: 0.25; rank 1: 0.5."),
        (lambda: penstock.EMA(optimizer, name=f"of{rank}"), 'Ranks differ in name: rank 0: "of0"; rank 1: "of1".'),
        (
            lambda: step_with(lr=0.01 * (1 + rank)),
            "Ranks differ in param_groups[0]['lr']: rank 0: 0.01; rank 1: 0.02. N",
        ),
        (
            lambda: step_with(lr=0.01 if rank else torch.tensor(1e-2), betas=(0.9, 0.999 - rank / 10)),
            "Ranks differ in param_groups[0]['lr']: rank 0: 0.009999999776482582; rank 1: 0.01.",
        ),
        (lambda: optimizer.clip_grad_norm_(1.0 + rank), "Ranks differ in max_norm: rank 0: 1.0; rank 1: 2.0."),
        (
            lambda: optimizer.full_param([first, second][rank]),
            'Ranks differ in parameter: rank 0: "0.weight"; rank 1: "1.weight".',
        ),
        (
            [optimizer.step, lambda: optimizer.full_grad(first)][rank],
            "Ranks are out of step: they have called different methods (rank 0: step(); rank 1: full_grad())",
        ),
        (
            lambda: optimizer.offload_states({["grad", "master"][rank]}),
            'Ranks differ in include: rank 0: ["grad"]; rank 1: ["master"].',
        ),
    ]
    for call, text in rows:
        assert said_by(call).startswith(f"EngineError: {text}")
    assert_same_state(state(model, optimizer), before)
    assert not optimizer.step().skipped
    optimizer.close()


def test_ranks_that_do_different_things_say_in_what_they_differ() -> None:
    run_ranks(differences, 2)


# Ranks that disagree at prepare

MATRIX = "torch.float32 (16, 16), in param group 0"


def differ(what: str, first: str, second: str) -> str:
    return f"Ranks differ in {what}: rank 0: {first}; rank 1: {second}. Nothing was changed: make it the same on every "


def differ_at(name: str, first: str, second: str) -> str:
    return differ(f"parameter '{name}'", f'"{first}"', f'"{second}"')


def half_frozen() -> nn.Module:
    model = net()
    model[1].weight.requires_grad_(False)
    return model


def with_buffer() -> nn.Module:
    model = net()
    model.register_buffer("offset", torch.zeros(3))
    return model


#: What rank 1 makes instead of `net()`, and what both say.
MODELS: list[tuple[Callable[[], nn.Module], str]] = [
    (half_frozen, differ_at("1.weight", MATRIX, f"{MATRIX}, frozen")),
    (lambda: net(width=8), differ_at("0.weight", MATRIX, MATRIX.replace("(16,", "(8,"))),
    (lambda: net(layers=3), differ_at("2.weight", f"{MATRIX}, frozen", MATRIX)),
    (lambda: net().bfloat16(), differ_at("0.weight", MATRIX, MATRIX.replace("float32", "bfloat16"))),
    (with_buffer, differ("buffer 'offset'", "none", '"torch.float32 (3,)"')),
]
#: What ranks give to `prepare`, and what both say.
ARGUMENTS: list[tuple[tuple[dict[str, Any], dict[str, Any]], str]] = [
    (({"precision": "fp32"}, {"precision": "bf16"}), differ("compute_dtype", '"torch.float32"', '"torch.bfloat16"')),
    (({}, {"stage": 0}), differ("stage", "3", "0")),
    (({}, {"units": (nn.Sequential,)}), "Ranks differ in unit '"),
    (
        ({"placement": penstock.Placement()}, {"placement": penstock.Placement(grads="cpu")}),
        differ("Placement(grads=)", '"device"', '"cpu"'),
    ),
    (
        ({}, {"options": penstock.Options(on_nonfinite="raise")}),
        differ("Options(on_nonfinite=)", '"skip"', '"raise"'),
    ),
]
#: What rank 1 alone is refused.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"precision": "fp12"}, "ConfigError: precision='fp12'"),
    ({"options": penstock.Options(live_bytes=1)}, "MemoryBudgetError: Options("),
]


def said_by_prepare(model: nn.Module, of: Any = torch.optim.AdamW, owned: int = 6, **arguments: Any) -> str:
    before = [p.detach().clone() for p in model.parameters()]
    given = of(list(model.parameters())[:owned], lr=1e-2)
    said = said_by(lambda: penstock.prepare(model, given, **{"precision": "fp32", **arguments}))
    assert all(map(torch.equal, model.parameters(), before)), said
    return said


def disagreements(rank: int) -> None:
    for make, text in MODELS:
        assert said_by_prepare(make() if rank else net(), owned=8).startswith(f"ConfigError: {text}")
    for each, text in ARGUMENTS:
        assert said_by_prepare(net(), **each[rank]).startswith(f"ConfigError: {text}")
    said = said_by_prepare(net(), owned=4 if rank else 6)
    text = differ_at("2.weight", f"{MATRIX}, frozen", "torch.float32 (16, 16), in no param group, frozen")
    assert said.startswith(f"ConfigError: {text}")
    said = said_by_prepare(net(), torch.optim.SGD if rank else torch.optim.AdamW)
    assert said.startswith("ConfigError: " + differ("optimizer", '"adamw"', '"sgd"'))
    for arguments, text in REFUSED:
        said = said_by_prepare(net(), **(arguments if rank else {}))
        assert said.startswith(text if rank else "EngineError: Rank 1 of 2 failed in prepare(), and this one stops")
    model = net()
    given = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = penstock.Options(update_threads=1 + rank, io_queue_depth=4 + rank)  # each rank's own
    optimizer = penstock.prepare(model, given, precision="fp32", options=options)
    optimizer.backward(loss_of(model))
    assert not optimizer.step().skipped
    optimizer.close()


def test_ranks_that_disagree_at_prepare_name_the_first_difference() -> None:
    run_ranks(disagreements, 2)


# What ranks say


def one_micro_batch_is_not_finite(rank: int) -> None:
    """Of rank 1, of two that are added where the host alone reaches the sum."""
    model, optimizer = prepared(net, overlap="backward", **ON_CPU)
    before = state(model, optimizer)
    for which in (0, 1):
        for bad in (which, None):  # and the flaw is forgotten with the gradient
            for micro in range(2):
                scale = math.inf if rank == 1 and micro == bad else 1.0
                with optimizer.no_sync() if micro == 0 else nullcontext():
                    optimizer.backward(loss_of(model) * scale)
            assert optimizer.step().skipped == (bad is not None)
            optimizer.zero_grad()
            if bad is not None:
                assert_same_state(state(model, optimizer), before)
        before = state(model, optimizer)
    optimizer.close()


def test_a_micro_batch_that_is_not_finite_on_one_rank_skips_the_step_on_all_before_any_update() -> None:
    run_ranks(one_micro_batch_is_not_finite, 2)


def words(rank: int) -> dict[str, Any]:
    ranks = Collectives.from_mesh(None, sharded=True)
    control_group = ranks.control_group
    found: dict[str, Any] = {"collected": control_group.collect({"rank": rank, "text": "é" * (1 + 50 * rank)})}
    found["shared"] = control_group.share([rank, None, 1.5])
    with torch.device("meta"), torch.inference_mode(), pytest.raises(TypeError):  # in whatever state the thread is
        control_group.collect(object())
    with torch.device("meta"), torch.inference_mode():
        found["in a state"] = control_group.collect(rank)
        with control_group.together("anything()") as rank_checks:
            rank_checks["nothing"] = math.nan
    other = control_group.another(error=ConfigError)
    found["another"] = said_by(lambda: other.agree(ValueError("no") if rank == 1 else None) if rank == 0 else None)
    if rank == 1:
        with pytest.raises(ValueError, match="no"):
            other.agree(ValueError("no"))
    ranks.close()
    return found


def test_what_ranks_say_is_json() -> None:
    for found in run_ranks(words, 2):
        assert [said["rank"] for said in found["collected"]] == [0, 1]
        assert [len(said["text"]) for said in found["collected"]] == [1, 51]
        assert found["shared"] == [0, None, 1.5]
        assert found["in a state"] == [0, 1]
    assert json.loads(json.dumps(found)) == found
