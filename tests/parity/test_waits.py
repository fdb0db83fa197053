"""Every wait of the engine is needed: without it, a row on slow streams gives another result or an error."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import penstock
from penstock.engine.forward_backward import saved_tensors
from penstock.errors import EngineError
from penstock.runtime import simulated
from penstock.runtime.streams import COLLECTIVE, UPLOAD, Streams
from tests.lib.engines import prepare_on
from tests.lib.memory import shorten_rings
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, until_waited_for
from tests.parity.needed import NEEDED_BY
from tests.parity.rows import Arithmetic, Movement, batches, loss_of, make_model, prepared, shares, train
from tests.parity.waits import DroppingStreams, Wait, complaints, listen, read_file, waits

SLOW_SECONDS = 0.01
TRIES = 6
KIB = 1 << 10

# Waits that another wait makes redundant today, by site, each with the reason.
IN_TURN = "slots are used in turn, and what is waited for was done with one that this one's slot was used after"
ONCE = "what the gradient's or the update's event says already"
MEASURED = "step measures first, which waits for every gradient; updates run in order"
AT_ONCE = "transfers are not late here"
MOVES = "only where homes move"
COMPUTE = "compute is never late here: tests/device/test_streams.py"
KEPT = "submitted work keeps its tensors here: tests/device"
COPIES = "tests/unit/tiers/test_movement.py; here updates wait for saves, and forwards for updates, before"
FORWARD = "the unit's forward, which waits for its update, comes before its backward"
SAVES = "of the thread that saves, whose events no site drops: tests/unit/engine/test_saving.py"
UNWANTED = "what is under way on bytes that were dropped is wanted by nobody: test_cuts.py, test_activations.py"
REDUNDANT = {
    "trainer.checkpoint_saved": "the tests of Trainer see to it",
    "save.over": SAVES,
    "save.copied": SAVES,
    "save.compute": COMPUTE,
    "checkpoint.tile_read": AT_ONCE,
    "checkpoint.reads_abandoned": AT_ONCE,
    "checkpoint.tile_written": AT_ONCE,
    "checkpoint.record_loaded": AT_ONCE,
    "read_ahead.over": "a transfer and not an event: tests/unit/checkpoint/test_ahead.py",
    "activations.away": KEPT,
    "activations.unwanted_write": UNWANTED,
    "activations.unwanted_reads": UNWANTED,
    "reduce.storage_free": MOVES,
    "reduce.storage_moved": MOVES,
    "reduce.over_before_zero": "late work measures into the gradient that was dropped; the wait raises its error",
    "reduce.norm_measured": "the gradient went home on that stream, or in place",
    "host_sum.storage_free": MOVES,
    "step.rest_complete": MEASURED,
    "step.rest_reads": SAVES,
    "pool.returned_reads": UNWANTED,
    "storage.earlier_reads": "of two reads that are under way here the later one ends last",
    "transfer.target_free": COPIES,
    "transfer.source_read": COPIES,
    "tile.complete": MEASURED,
    "tile.copy_complete": MEASURED,
    "tile.reuse_complete": MEASURED,
    "tile.reuse_ready": ONCE,
    "tile.load_complete": MEASURED,
    "tile.load_stored": IN_TURN,
    "load.target_free": "the record is stored later",
    "load.copy_target_free": ONCE,
    "store.write_in_order": AT_ONCE,
    "slot.earlier_use": "only where a slot is stored from and copied from, both late",
    "slot.new_use": "only where a slot is stored from and copied from, both late",
    "update.gradient_read": FORWARD,
    "update.later_tiles_written": "the tiles that are left to the step are compute's own",
    "offload.clean_up": COMPUTE,
    "offload.arrived": "the clean-up waits too; it hears of errors: test_residency.py",
    "offload.clean_up_queued": "the work waits too: an interrupt may leave it to the next move",
    "failure.noted": "an error, and nothing to wait for",
    "offload.ended_for_compute": "it is for a stream of the host, which synchronizes",
    "ring.free": "the clean-up waits for each slot of the ring",
    "ring.free_to_drop": MOVES,
    "release.failed_gather_over": "only where a gather has failed in part: test_overlap.py",
    "pool.memory_unused": UNWANTED,
    "pool.returned_write": UNWANTED,
    "quantized_gather.buffer_free": "this rank's part comes up after it, on its stream",
    "records.visit_stored": "who visits waits for every home first",
    "records.visit_written": AT_ONCE,
    "records.visit_loaded": "a transfer and not an event: the tests of records see to it",
}
Values = list[Any]
RowRun = Callable[[Streams], Values]


def values(optimizer: penstock.Optimizer, model: torch.nn.Module) -> Iterator[Tensor]:
    for p in model.parameters():
        yield optimizer.full_param(p)
        yield optimizer.full_state(p, "exp_avg_sq")


def training(how: Movement, *, rank: int = 0, world_size: int = 1) -> RowRun:
    """Steps of two micro-batches."""
    begins = how.overlap == "backward"

    def run(streams: Streams) -> Values:
        what = Arithmetic(accumulation=2, clip=None if begins else 0.5, no_sync=begins)
        trace = train(what, how, streams=streams, steps=2, rank=rank, world_size=world_size)
        return [*trace.losses, *trace.norms, *(t for ts in trace.final.values() for t in ts)]

    return run


def looking_right_after_backward(streams: Streams) -> Values:
    model, optimizer = prepared(Arithmetic(), Movement(grads="cpu", optimizer="cpu"), streams)
    seen = []
    for (batch,), *_ in batches(1, 1)[:2]:
        optimizer.backward(loss_of(model, batch))
        seen += [optimizer.full_grad(p) for p in model.parameters()]
    optimizer.close()
    return seen


def looking_at_what_is_in_parts_while_it_moves(streams: Streams) -> Values:
    """What goes into files may be there before what goes to the device."""
    half = shares(device=0.5, nvme=0.5)
    model, optimizer = prepared(Arithmetic(), Movement(params=half, optimizer=half).but(tile_bytes=4 * KIB), streams)
    optimizer.offload_states()
    optimizer.reload_states(non_blocking=True)
    seen = list(values(optimizer, model))
    optimizer.close()
    return seen


def setting_a_parameter_right_after_step(streams: Streams) -> Values:
    """The step publishes what it wrote beside the other tier; the rest of the unit must not be lost."""
    model, optimizer = prepared(Arithmetic(), Movement(params="cpu"), streams)
    seen = []
    for (batch,), *_ in batches(1, 1)[:3]:
        loss = loss_of(model, batch)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.set_full_param(model.blocks[0].norm.weight, torch.full((32,), 0.5))
        seen.append(loss.item())
    seen += values(optimizer, model)
    optimizer.close()
    return seen


def two_micro_batches_on_a_cut(streams: Streams) -> Values:
    """Of one block, summed in another dtype than reduced: no buffer of the one is waited for by the other."""
    what = Arithmetic(precision="bf16", accumulation=2, accumulation_dtype=torch.float32)
    how = Movement(grads=shares(device=0.35, cpu=0.65)).but(tile_bytes=4 * KIB)
    model, optimizer = prepared(what, how, streams)
    model.blocks_used = 1
    for (batch,) in batches(1, 2)[0]:
        optimizer.backward(loss_of(model, batch))
    seen = [optimizer.full_grad(p) for p in model.blocks[0].parameters()]
    optimizer.close()
    return seen


def cast_on_the_host(grads: str) -> RowRun:
    """Gradients that are summed in another dtype than reduced."""

    def run(streams: Streams) -> Values:
        what = Arithmetic(precision="bf16", accumulation_dtype=torch.float32)
        how = Movement(grads=grads, optimizer="cpu").but(tile_bytes=4 * KIB)
        model, optimizer = prepared(what, how, streams)
        optimizer.backward(loss_of(model, batches(1, 1)[0][0][0]))
        seen = [optimizer.full_grad(p) for p in model.parameters()]
        optimizer.close()
        return seen

    return run


def clearing_right_after_backward(streams: Streams) -> Values:
    """A block that has no gradient any more must not count in the norm."""
    model, optimizer = prepared(Arithmetic(), Movement(grads="cpu", optimizer="cpu"), streams)
    first, second = (step[0][0] for step in batches(1, 1)[:2])
    optimizer.backward(loss_of(model, first))
    optimizer.zero_grad()
    model.blocks_used = 1
    optimizer.backward(loss_of(model, second))
    norm = optimizer.step().grad_norm
    optimizer.close()
    return [norm]


def nothing_in_flight_after_step(streams: Streams) -> Values:
    """Without overlap `step` returns when every update has run. `locations` does not wait."""
    how = Movement(params="cpu", grads="cpu", optimizer="cpu", overlap="none")
    model, optimizer = prepared(Arithmetic(), how, streams)
    optimizer.backward(loss_of(model, batches(1, 1)[0][0][0]))
    optimizer.step()
    in_flight = [row.kind for row in optimizer.locations().rows if row.in_flight and row.kind != "param"]
    optimizer.close()
    return in_flight


def updated_when_step_returns(streams: Streams) -> Values:
    """Without overlap. Nothing but the step waits."""
    how = Movement(params="cpu", grads="cpu", optimizer="cpu", overlap="none")
    model, optimizer = prepared(Arithmetic(), how, streams)
    optimizer.backward(loss_of(model, batches(1, 1)[0][0][0]))
    optimizer.step()
    storages = [unit.trained.optimizer for unit in optimizer._engine.context.units]
    seen = [tensor.clone() for storage in storages for segment in storage.segments for tensor in segment.tensors]
    optimizer.close()
    return seen


def updated_before_a_gradient_that_is_not_finite(streams: Streams) -> Values:
    """The step must say so: it cannot be skipped whole any more."""
    model, optimizer = prepared(Arithmetic(), Movement(grads="cpu", optimizer="cpu", overlap="backward"), streams)
    model.first.register_forward_hook(
        lambda _module, _inputs, made: made.register_hook(lambda g: g * torch.nan) and None
    )
    optimizer.backward(loss_of(model, batches(1, 1)[0][0][0]))
    seen = []
    try:
        optimizer.step()
    except EngineError as error:
        seen.append(str(error))
    with suppress(EngineError):
        optimizer.close(keep_params=False)
    return seen


def skipping_what_was_prefetched(streams: Streams) -> Values:
    model, optimizer = prepared(Arithmetic(), Movement(params="cpu"), streams)
    seen = []
    for number, ((batch,), *_) in enumerate(batches(1, 1)[:4]):
        model.blocks_used = 1 + number % 2
        with torch.no_grad():
            seen.append(loss_of(model, batch).item())
    optimizer.close()
    return seen


def activations_away(streams: Streams) -> Values:
    """What forward saves is gone at its end, in the second forward to memory of the first."""
    model = make_model()
    placement = penstock.Placement(activations="cpu")
    stock = Arithmetic().make_optimizer(list(model.parameters()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_tensors, "LEAST_BYTES", KIB // 2)
        patch.setattr(saved_tensors, "AHEAD_BYTES", 0)
        optimizer = prepare_on(streams, model, stock, precision="fp32", placement=placement)
        for (batch,), *_ in batches(1, 1)[:2]:
            optimizer.backward(loss_of(model, batch))
    seen = [optimizer.full_grad(p) for p in model.parameters()]
    optimizer.close()
    return seen


def saved(how: Movement, *, beside: bool) -> RowRun:
    """What a checkpoint has that is saved right after a step, or beside the next one."""

    def run(streams: Streams) -> Values:
        model, optimizer = prepared(Arithmetic(), how, streams)
        other, reader = prepared(Arithmetic(), Movement())
        with TemporaryDirectory() as folder:
            for (batch,), *_ in batches(1, 1)[:2]:
                optimizer.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                if not beside or not any(Path(folder).iterdir()):
                    optimizer.save(Path(folder, "a"), blocking=not beside)
            optimizer.close()
            reader.load(Path(folder, "a"))
        seen = list(values(reader, other))
        reader.close()
        return seen

    return run


def in_flight(optimizer: penstock.Optimizer) -> list[str]:
    return [row.kind for row in optimizer.locations().rows if row.in_flight]


def nothing_in_flight_once_the_old_memory_went(streams: Streams) -> Values:
    _, optimizer = prepared(Arithmetic(), EVERYTHING_ON_DEVICE, streams)
    optimizer.offload_states(non_blocking=True)
    optimizer._engine.offloader._cleaned.synchronize()
    seen = in_flight(optimizer)
    optimizer.close()
    return seen


def old_memory_went_before_parameters_come(streams: Streams) -> Values:
    model = make_model()
    model.blocks[0].requires_grad_(False)
    given = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    optimizer = prepare_on(streams, model, given, options=penstock.Options(tile_bytes=4 * KIB))
    store, seen = optimizer._engine.context.store, []
    reserve = store.reserve

    def note(*arguments: Any, **rest: Any) -> Any:
        seen.append([segment.plan.storage for segment in store._leaving])
        return reserve(*arguments, **rest)

    optimizer.offload_states()
    optimizer.reload_states(non_blocking=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "reserve", note)
        model.blocks[0].requires_grad_(True)
        optimizer.add_param_group({"params": model.blocks[0].parameters()})
    optimizer.close()
    return seen


def stepping_on_the_device_while_states_move(streams: Streams) -> Values:
    """Compute updates, and nothing else makes it wait."""
    model, optimizer = prepared(Arithmetic(), EVERYTHING_ON_DEVICE, streams)
    optimizer.offload_states({"optimizer"})
    optimizer.backward(loss_of(model, batches(1, 1)[0][0][0]))
    optimizer.reload_states(non_blocking=True)
    optimizer.step()
    seen = list(values(optimizer, model))
    optimizer.close()
    return seen


def forward_while_parameters_move(streams: Streams) -> Values:
    model, optimizer = prepared(Arithmetic(), GRADS_IN_FILES, streams)
    with torch.no_grad():
        optimizer.offload_states({"param"}, "nvme")
        optimizer.reload_states(non_blocking=True)
        seen = [loss_of(model, batches(1, 1)[0][0][0]).item()]
    optimizer.close()
    return seen


def shadows_of_parameters_that_move(streams: Streams) -> Values:
    """A reload makes them of the parameters that it brings."""
    model, optimizer = prepared(Arithmetic(), OPTIMIZER_ON_CPU, streams)
    optimizer.offload_states({"param"})
    optimizer.reload_states()
    optimizer.backward(loss_of(model, batches(1, 1)[0][0][0]))
    optimizer.step()
    seen = list(values(optimizer, model))
    optimizer.close()
    return seen


def averaging(how: Movement, tier: Any) -> RowRun:
    """An average that follows steps, which go on meanwhile, and is shown right after the last."""

    def run(streams: Streams) -> Values:
        model, optimizer = prepared(Arithmetic(precision="bf16"), how, streams)
        ema = penstock.EMA(optimizer, 0.5, tier=tier)
        for (batch,), *_ in batches(1, 1)[:3]:
            optimizer.backward(loss_of(model, batch))
            optimizer.step()
            ema.update()
            optimizer.zero_grad()
        with ema.applied():
            seen = list(values(optimizer, model))
        seen += values(optimizer, model)
        optimizer.close()
        return seen

    return run


def saving_an_average_beside_its_update(streams: Streams) -> Values:
    model, optimizer = prepared(Arithmetic(), EVERYTHING_ON_CPU, streams)
    ema = penstock.EMA(optimizer, 0.5)
    other, reader = prepared(Arithmetic(), Movement())
    copy = penstock.EMA(reader)
    with TemporaryDirectory() as folder:
        optimizer.backward(loss_of(model, batches(1, 1)[0][0][0]))
        optimizer.step()
        optimizer.save(Path(folder, "a"), blocking=False)
        ema.update()
        optimizer.close()
        reader.load(Path(folder, "a"))
    with copy.applied():
        seen = list(values(reader, other))
    reader.close()
    return seen


EVERYTHING_ON_DEVICE = Movement().but(tile_bytes=4 * KIB)
EVERYTHING_ON_CPU = Movement(params="cpu", grads="cpu", optimizer="cpu").but(tile_bytes=4 * KIB)
OPTIMIZER_ON_DEVICE = Movement(params="cpu", grads="cpu").but(tile_bytes=4 * KIB)
GRADS_IN_FILES = Movement(params="cpu", grads="nvme", optimizer="cpu").but(tile_bytes=16 * KIB)
OPTIMIZER_ON_CPU = Movement(optimizer="cpu").but(tile_bytes=4 * KIB)
PACKED = EVERYTHING_ON_CPU.but(gather_format="int8")
IN_FILES = Movement(params="nvme", grads="nvme", optimizer="nvme", overlap="forward").but(tile_bytes=16 * KIB)
OPTIMIZER_IN_FILES = Movement(optimizer="nvme", overlap="forward").but(tile_bytes=16 * KIB)
SPLIT = Movement(
    params=shares(device=0.4, cpu=0.3, nvme=0.3),
    grads=shares(device=0.2, cpu=0.5, nvme=0.3),
    optimizer=shares(device=0.5, cpu=0.2, nvme=0.3),
    overlap="forward",
).but(tile_bytes=4 * KIB)

ROWS: dict[str, RowRun] = {
    "looking right after backward": looking_right_after_backward,
    "looking at what is in parts while it moves": looking_at_what_is_in_parts_while_it_moves,
    "setting a parameter right after step": setting_a_parameter_right_after_step,
    "two micro-batches on a cut": two_micro_batches_on_a_cut,
    "clearing right after backward": clearing_right_after_backward,
    "nothing in flight after step": nothing_in_flight_after_step,
    "updated when step returns": updated_when_step_returns,
    "activations away": activations_away,
    "nothing in flight once the old memory went": nothing_in_flight_once_the_old_memory_went,
    "old memory went before parameters come": old_memory_went_before_parameters_come,
    "stepping on the device while states move": stepping_on_the_device_while_states_move,
    "forward while parameters move": forward_while_parameters_move,
    "shadows of parameters that move": shadows_of_parameters_that_move,
    "skipping what was prefetched": skipping_what_was_prefetched,
    "everything on cpu": training(EVERYTHING_ON_CPU),
    "optimizer on device": training(OPTIMIZER_ON_DEVICE),
    "everything in files": training(IN_FILES),
    "optimizer in files": training(OPTIMIZER_IN_FILES),
    "updated in backward": training(replace(OPTIMIZER_ON_CPU, overlap="backward")),
    "updated in backward, in parts": training(replace(SPLIT, overlap="backward")),
    "updated before a gradient that is not finite": updated_before_a_gradient_that_is_not_finite,
    "cast into files": cast_on_the_host("nvme"),
    "streamed, and saved right after": saved(EVERYTHING_ON_CPU.but(streamed_updates=0.5), beside=False),
    "saving what is in files": saved(IN_FILES, beside=False),
    "saving beside a step": saved(EVERYTHING_ON_CPU, beside=True),
    "averaging on the host": averaging(replace(OPTIMIZER_ON_CPU, overlap="forward"), "cpu"),
    "averaging on the host what is on the device": averaging(EVERYTHING_ON_DEVICE, "cpu"),
    "averaging on the device": averaging(replace(EVERYTHING_ON_CPU, overlap="forward"), "device"),
    "saving an average beside its update": saving_an_average_beside_its_update,
}


@dataclass(frozen=True)
class OfTwoRanks:
    """A row that needs another rank, and the stream that must be slow."""

    how: Movement
    slow: str


OF_TWO_RANKS = {
    "gather.uploaded": OfTwoRanks(EVERYTHING_ON_CPU, UPLOAD),
    "gather.replica_source": OfTwoRanks(EVERYTHING_ON_CPU.but(stage=1), COLLECTIVE),
    "quantized_gather.uploaded": OfTwoRanks(PACKED, UPLOAD),
    "quantized_gather.received": OfTwoRanks(PACKED, COLLECTIVE),
    "gather.secondary_source": OfTwoRanks(EVERYTHING_ON_CPU.but(secondary_shard=2), COLLECTIVE),
    "host_sum.received": OfTwoRanks(EVERYTHING_ON_CPU, COLLECTIVE),
    "device_sum.received": OfTwoRanks(IN_FILES, COLLECTIVE),
    "reduce.written_in_place": OfTwoRanks(EVERYTHING_ON_DEVICE, COLLECTIVE),
}


def same(ours: Values, theirs: Values) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(ours, theirs, strict=True)
    )


@dataclass
class Outcome:
    same: bool
    waits_seen: set[str]


OfRank = tuple[Values, Outcome]


@pytest.fixture(autouse=True)
def _short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots: what reuses one too early meets what is still in it."""
    shorten_rings(monkeypatch)


def sleep_once_waited_for(seconds: float) -> None:
    """However late the host is on a busy machine: the delay begins when it waits for something, or soon."""
    if seconds:
        soon = time.monotonic() + 3 * seconds
        until_waited_for(or_once=lambda: time.monotonic() > soon)
        time.sleep(seconds)


def attempt(run: RowRun, expected: Values, slow: str, dropped: str | None, seconds: float = SLOW_SECONDS) -> Outcome:
    """Run a row on streams of which one is slow, and that leave a wait out."""
    streams = DroppingStreams(lambda stream, nbytes: seconds if stream == slow else 0.0, dropped)
    with pytest.MonkeyPatch.context() as patch:
        heard = listen(patch, dropped)
        patch.setattr(simulated, "time", SimpleNamespace(sleep=sleep_once_waited_for))
        try:
            found = run(streams)
        except Exception:
            if dropped is None:
                raise
            found = []
        finally:
            streams.close()
    return Outcome(same(found, expected), streams.seen.union(*(ear.seen for ear in heard)))


@cache
def expected_of(row: str) -> Values:
    return ROWS[row](inline())


@cache
def is_right(row: str, slow: str) -> bool:
    """Whether the row is right with all waits while a stream is slow."""
    return attempt(ROWS[row], expected_of(row), slow, None).same


@pytest.mark.filterwarnings("ignore:module forward hook with")  # what goes wrong may do so in a hook
@pytest.mark.parametrize(
    "wait", [w for w in waits() if w.site not in (*REDUNDANT, *OF_TWO_RANKS)], ids=lambda wait: wait.site
)
def test_without_the_wait_a_row_goes_wrong(wait: Wait) -> None:
    assert wait.site in NEEDED_BY, f"{wait.place}: name the row of {wait.site} in needed.py, or drop the wait"
    row, slow = NEEDED_BY[wait.site]
    # On a busy machine the host may be later than a stream that is slow: the next try has a slower one.
    for number in range(TRIES):
        outcome = attempt(ROWS[row], expected_of(row), slow, wait.place, SLOW_SECONDS * 2**number)
        assert wait.place in outcome.waits_seen, f"{row} does not wait at {wait.site} ({wait.place})"
        if not outcome.same:
            assert is_right(row, slow), "the row goes wrong with the wait too"
            return
    pytest.fail(f"{wait.site} ({wait.place}) can be dropped: {row} stays right. Name a row that needs it, or drop it.")


def told_by_steps(how: Movement, rank: int) -> RowRun:
    """Losses and norms of two ranks: what one of them has wrong is in those of the steps that follow."""

    def run(streams: Streams) -> Values:
        model, optimizer = prepared(Arithmetic(accumulation=2, clip=0.5), how, streams)
        seen: Values = []
        for micro_batches in batches(2, 2)[:3]:
            for ranks in micro_batches:
                loss = loss_of(model, ranks[rank])
                optimizer.backward(loss)
                seen.append(loss.item())
            seen.append(optimizer.step().grad_norm)
            optimizer.zero_grad()
        optimizer.close()
        return seen

    return run


def of_rank(rank: int, name: str, expected: Values | None, dropped: str | None) -> OfRank:
    """What a row gives with nothing asynchronous, and how it goes without a wait."""
    with pytest.MonkeyPatch.context() as patch:
        shorten_rings(patch)
        run = told_by_steps(OF_TWO_RANKS[name].how, rank)
        expected = expected or run(inline())
        return expected, attempt(run, expected, OF_TWO_RANKS[name].slow, dropped)


def with_all_waits(rank: int) -> dict[str, OfRank]:
    return {name: of_rank(rank, name, None, None) for name in OF_TWO_RANKS}


@pytest.fixture(scope="module")
def kept_of_ranks() -> list[dict[str, OfRank]]:
    return run_ranks(with_all_waits, 2)


@pytest.mark.parametrize("wait", [w for w in waits() if w.site in OF_TWO_RANKS], ids=lambda wait: wait.site)
def test_without_the_wait_two_ranks_go_wrong(wait: Wait, kept_of_ranks: list[dict[str, OfRank]]) -> None:
    expected = kept_of_ranks[0][wait.site][0], kept_of_ranks[1][wait.site][0]
    for kept in kept_of_ranks:
        outcome = kept[wait.site][1]
        assert outcome.same
        assert wait.place in outcome.waits_seen, "the row does not wait there"
    # A rank that goes wrong may leave the other waiting in a collective, until it times out.
    try:
        found = run_ranks(without, 2, wait.site, expected, wait.place, timeout=timedelta(seconds=20))
    except AssertionError as error:
        if "died with exit code" in str(error):  # gloo ends a process that meets another collective than its own
            return
        raise
    assert not all(found), f"{wait.site} ({wait.place}) can be dropped"


def without(rank: int, name: str, expected: tuple[Values, Values], dropped: str) -> bool:
    return of_rank(rank, name, expected[rank], dropped)[1].same


def test_every_wait_has_a_site_of_its_own() -> None:
    assert complaints() == [], "\n".join(complaints())


@pytest.mark.parametrize(
    ("line", "sites"),
    [
        ("event.wait()  # site a.b", ["a.b"]),
        ("event.wait()  # site a.b: else it is read too early", ["a.b"]),
        ("# site a.b\n# Else it is read too early.\nevent.wait()", ["a.b"]),
        ("submit(\n    UPLOAD,\n    after=(one, two),  # site a.b, c.d\n)", ["a.b", "c.d"]),
        ("home.note_write(all_of([one, *more]))  # site noted, first, rest", ["noted", "first", "rest"]),
        ("event.wait()", None),
        ("event.wait()  # of a site", None),
        ("submit(UPLOAD, after=(one, two))  # site a.b", None),
        ("event.done()  # site a.b", None),
        ("# site a.b\nevent.done()", None),
    ],
)
def test_sites_are_read_from_comments(line: str, sites: list[str] | None, tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(f"if engine:\n{indent(line, '    ')}\n")
    found, wrong = read_file(source)
    if sites is None:
        assert wrong
    else:
        assert ([wait.site for wait in found], wrong) == (sites, [])


def test_the_lists_of_waits_are_up_to_date() -> None:
    assert {*REDUNDANT, *OF_TWO_RANKS, *NEEDED_BY} <= {wait.site for wait in waits()}
    assert REDUNDANT.keys().isdisjoint({*OF_TWO_RANKS, *NEEDED_BY})
