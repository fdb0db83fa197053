"""optimizer.record: what its lines say, what it costs a run (nothing in its numbers), and how it ends."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError, EngineError
from penstock.ext.observe.observer import Observer
from penstock.ext.observe.record import STEPS_BEFORE, STEPS_TRACED
from penstock.runtime.streams import UPDATE
from tests.lib.accelerator import FakeTime
from tests.lib.engines import ON_CPU, assert_same_state, loss_of, prepared, state, train
from tests.lib.models import WIDTH, stack
from tests.lib.ranks import run_ranks
from tests.lib.refusals import Refusal, refused, rows
from tests.lib.streams import LastingStreams, inline, separate, simulated


def recorded(streams: Any = inline, **how: Any) -> tuple[nn.Module, penstock.Optimizer]:
    return prepared(stack, streams, **{"overlap": "forward", **ON_CPU, **how})


def one_step(model: nn.Module, optimizer: penstock.Optimizer, number: int = 0) -> Tensor:
    loss = loss_of(model, number)
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def written(folder: Path, event: str = "step") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["event"] == event]


def whole(folder: Path) -> list[dict[str, Any]]:
    """The lines that the optimizer has written, not those of `log`."""
    return [line for line in written(folder) if "grad_norm" in line]


@pytest.mark.parametrize("make_streams", [inline, separate, simulated])
def test_a_line_for_each_step_says_what_it_was(make_streams: Any, tmp_path: Path) -> None:
    model, optimizer = recorded(make_streams)
    optimizer.param_groups[0]["lr"] = 0.5
    with optimizer.record(tmp_path, config={"seed": 1, "far": math.inf}):
        results = [one_step(model, optimizer, number) for number in range(5)]
        optimizer.synchronize()
        located = optimizer.locations()
    steps = whole(tmp_path)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert all(line["lr"] == 0.5 and line["step_seconds"] > 0 and line["grad_norm"] > 0 for line in steps)
    assert steps[-1]["seconds"] >= steps[0]["seconds"] >= steps[0]["step_seconds"] - 1e-6
    assert steps[-1]["bytes_by_tier"]["cpu"] == located.bytes(tier="cpu")
    (start,) = written(tmp_path, "start")
    assert start["config"] == {"seed": 1, "far": None}
    assert (start["world_size"], start["rank"], start["optimizer"]) == (1, 0, "AdamW")
    assert start["parameter_count"] == 3 * (WIDTH * WIDTH + WIDTH) == start["trained_count"]
    assert written(tmp_path, "end")[0]["steps"] == len(results)


def test_losses_and_weights_are_those_without_a_record(tmp_path: Path) -> None:
    plain, ours = recorded(simulated), recorded(simulated)
    losses = train(*plain, 6)
    again = []
    with ours[1].record(tmp_path) as recorder:
        for number in range(6):
            loss = one_step(*ours, number)
            recorder.log(loss=loss)
            again.append(loss.item())
    assert again == losses
    assert_same_state(state(*ours), state(*plain))


def test_bytes_are_those_of_the_report_on_every_tier(tmp_path: Path) -> None:
    model, optimizer = recorded(grads="device", optimizer={"nvme": 0.5, "device": 0.5})
    with optimizer.record(tmp_path):
        train(model, optimizer, 3)
        found = optimizer.locations()
        assert whole(tmp_path)[-1]["bytes_by_tier"] == {
            tier: size for tier in ("device", "cpu", "nvme") if (size := found.bytes(tier=tier))
        }
    (placed,) = written(tmp_path, "placement")
    assert placed["step"] == 3
    assert sum(row["nbytes"] for row in placed["rows"]) == sum(row.nbytes for row in found.rows)


def test_a_tensor_is_read_a_step_later_and_the_last_at_the_end(tmp_path: Path) -> None:
    model, optimizer = recorded()
    with optimizer.record(tmp_path) as recorder:
        losses = []
        for number in range(3):
            loss = one_step(model, optimizer, number)
            recorder.log(loss=loss, tokens=7)
            losses.append(loss.item())
            assert [line["step"] for line in written(tmp_path) if "loss" in line] == list(range(1, number + 1))
            assert [line["tokens"] for line in written(tmp_path) if "tokens" in line] == [7] * (number + 1)
    assert [line["loss"] for line in written(tmp_path) if "loss" in line] == losses


def test_groups_with_different_rates_have_one_each(tmp_path: Path) -> None:
    model, optimizer = recorded(
        stock=lambda p: torch.optim.AdamW([{"params": [q], "lr": 1 / (n + 1)} for n, q in enumerate(p)])
    )
    with optimizer.record(tmp_path):
        one_step(model, optimizer)
    assert whole(tmp_path)[0]["lr"] == [1 / (n + 1) for n in range(6)]


def test_a_skipped_step_is_counted_and_its_norm_is_null(tmp_path: Path) -> None:
    model, optimizer = recorded()
    with optimizer.record(tmp_path):
        optimizer.backward(model(torch.full((4, WIDTH), math.nan)).mean())
        assert optimizer.step().skipped
        optimizer.zero_grad()
        one_step(model, optimizer)
    assert [(line["grad_norm"] is None, line["skipped_count"]) for line in whole(tmp_path)] == [(True, 1), (False, 1)]


@pytest.mark.parametrize("clip", ["ours", "torch", "prepare"])
def test_the_norm_is_that_before_clipping_whoever_clips(clip: str, tmp_path: Path) -> None:
    model, optimizer = recorded(max_grad_norm=1e-3 if clip == "prepare" else None)
    with optimizer.record(tmp_path):
        optimizer.backward(model(torch.ones(4, WIDTH)).square().mean())
        norm = math.sqrt(sum(float(optimizer.full_grad(p).square().sum()) for p in model.parameters()))
        if clip == "ours":
            optimizer.clip_grad_norm_(1e-3)
        elif clip == "torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    assert whole(tmp_path)[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_waits_are_put_down_to_the_stream_that_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward of a step waits for uploads, which follow updates of the step before it, which take their time."""
    clock = FakeTime()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    model, optimizer = recorded(LastingStreams(clock, UPDATE))
    with optimizer.record(tmp_path):
        train(model, optimizer, 5)
    first, *_, last = whole(tmp_path)
    assert "traced" not in first
    assert last["waits"] == {"upload": 1}
    assert last["waited"] == 1


def test_a_warm_step_is_traced_once(tmp_path: Path) -> None:
    model, optimizer = recorded(simulated)
    with optimizer.record(tmp_path):
        train(model, optimizer, STEPS_BEFORE + STEPS_TRACED)
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        (tmp_path / "trace.json").unlink()
        train(model, optimizer, 3)
    assert not (tmp_path / "trace.json").exists()
    ends = [event for event in events if event.get("cat") == "step"]
    assert [event["ph"] for event in ends] == ["i", "i"]
    assert [line["step"] for line in whole(tmp_path) if "traced" in line] == [2, 3]


def test_counters_say_the_bytes_on_each_tier(tmp_path: Path) -> None:
    model, optimizer = recorded(separate)
    with optimizer.trace(tmp_path / "trace.json"):
        train(model, optimizer, 2)
    counters = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "C"]
    on_cpu = {e["args"]["bytes"] for e in counters if e["name"] == "bytes on cpu"}
    assert on_cpu == {optimizer.locations().bytes(tier="cpu")}
    on_device = [e["args"]["bytes"] for e in counters if e["name"] == "bytes on device"]
    assert max(on_device) > 0  # units come and go there
    assert min(on_device) == 0


@pytest.mark.parametrize("before", [0, STEPS_BEFORE], ids=["before its own", "in the middle of its own"])
def test_a_trace_that_is_asked_for_goes_first(before: int, tmp_path: Path) -> None:
    model, optimizer = recorded()
    with optimizer.record(tmp_path):
        train(model, optimizer, before)
        with optimizer.trace(tmp_path / "mine.json") as report:
            train(model, optimizer, STEPS_BEFORE + 2)
        train(model, optimizer, 1 + STEPS_TRACED)
    assert report.summary is not None
    assert json.loads((tmp_path / "mine.json").read_text())["traceEvents"]
    assert len(whole(tmp_path)) == before + STEPS_BEFORE + 3 + STEPS_TRACED
    assert before or (tmp_path / "trace.json").exists(), "one that is under way is waited for"


class TestFile:
    def test_a_run_that_goes_on_adds_behind_a_torn_line(self, tmp_path: Path) -> None:
        model, optimizer = recorded()
        with optimizer.record(tmp_path):
            train(model, optimizer, 2)
        file = tmp_path / "metrics.jsonl"
        file.write_text(file.read_text() + '{"event": "step", "st')
        with optimizer.record(tmp_path, begin=2):
            train(model, optimizer, 1)
        found = [line for line in file.read_text().splitlines() if line != '{"event": "step", "st']
        assert [json.loads(line)["step"] for line in found if '"grad_norm"' in line] == [1, 2, 3]
        assert json.loads(found[-2 if '"placement"' in found[-2] else -1])

    def test_a_run_from_the_beginning_replaces_what_was_there(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").write_text("of an earlier run\n")
        (tmp_path / "plan.json").write_text("{}")
        model, optimizer = recorded()
        with optimizer.record(tmp_path):
            train(model, optimizer, 1)
        assert [line["step"] for line in whole(tmp_path)] == [1]
        assert not (tmp_path / "plan.json").exists()

    def test_two_do_not_write_one_file(self, tmp_path: Path) -> None:
        (_, one), (_, other) = recorded(), recorded()
        with one.record(tmp_path):
            with pytest.raises(ConfigError, match=r"metrics\.jsonl is being written by another recorder"):
                other.record(tmp_path)
            with pytest.raises(EngineError, match=r"while steps are recorded in .*Close that one first"):
                one.record(tmp_path / "else")

    def test_closing_the_optimizer_closes_its_record(self, tmp_path: Path) -> None:
        model, optimizer = recorded()
        recorder = optimizer.record(tmp_path)
        train(model, optimizer, 2)  # in the middle of its trace
        optimizer.close()
        assert recorder.closed
        assert written(tmp_path, "end")
        recorder.log(loss=1.0)  # says nothing any more
        assert not [line for line in written(tmp_path) if "loss" in line]

    @pytest.mark.parametrize("begin", [0, 1])
    def test_a_planted_link_is_not_followed(self, begin: int, tmp_path: Path) -> None:
        theirs = tmp_path / "theirs"
        theirs.write_text("before")
        folder = tmp_path / "record"
        folder.mkdir()
        (folder / "metrics.jsonl").symlink_to(theirs)
        model, optimizer = recorded()
        with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be written: it is a link"):
            optimizer.record(folder, begin=begin)
        (folder / "metrics.jsonl").unlink()
        for name in ("trace.json", "plan.json"):
            (folder / name).symlink_to(theirs)
        with optimizer.record(folder, begin=begin):
            train(model, optimizer, 4)
        with (
            pytest.raises(ConfigError, match="it is a link, which is not followed"),
            optimizer.trace(folder / "trace.json"),
        ):
            pass
        assert theirs.read_text() == "before"
        assert (folder / "plan.json").is_symlink()

    def test_a_disk_that_is_full_ends_the_record_and_no_step(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, optimizer = recorded()
        recorder = optimizer.record(tmp_path)
        train(model, optimizer, 1)

        class Full:
            closed = False

            def write(self, text: bytes) -> None:
                raise OSError(28, "No space left on device")

            def close(self) -> None:
                Full.closed = True

        assert recorder._lines is not None
        recorder._lines._file.close()
        monkeypatch.setattr(recorder._lines, "_file", Full())
        with pytest.warns(UserWarning, match=r"metrics\.jsonl ends here: .*No space left"):
            train(model, optimizer, 1)
        train(model, optimizer, 2)


def record(where: str, begin: int = 0) -> Callable[..., Any]:
    return lambda optimizer, folder: optimizer.record(folder / where, begin=begin)


REFUSED = {
    "below a file": Refusal(record("file/below"), "cannot be written"),
    "steps": Refusal(record("a", -1), "number of steps that were made before"),
    "rank": Refusal(record("{rank}"), "the first rank alone writes"),
    "untrained": Refusal(record("a"), "nothing trains this model", EngineError, {"stock": None}),
}


@rows(REFUSED)
def test_what_cannot_be_recorded_is_refused_before_anything_is_written(row: Refusal, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _, optimizer = prepared(stack, **row.how or {})
    refused(row, optimizer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_no_text_is_logged(tmp_path: Path) -> None:
    _, optimizer = recorded()
    with optimizer.record(tmp_path) as recorder, pytest.raises(ConfigError, match=r"log\(loss='much'\): give a number"):
        recorder.log(loss="much")  # type: ignore[arg-type]


def test_figures_are_means_over_the_steps_since_they_were_taken(tmp_path: Path) -> None:
    model, optimizer = recorded(separate)
    with optimizer.record(tmp_path) as recorder:
        assert (recorder.take(), recorder.measured()) == ({}, {})
        for number in range(8):
            one_step(model, optimizer, number)
            recorder.log(tokens=4)
            if number == 3:
                recorder.take()
        taken, measured = recorder.take(), recorder.measured()
        assert recorder.take() == {}
    lines = whole(tmp_path)[4:]
    seconds = [line["step_seconds"] for line in lines]
    assert taken["step_seconds"] == pytest.approx(sum(seconds) / 4, rel=1e-3)
    assert taken["tokens_per_second"] == pytest.approx(16 / sum(seconds), rel=1e-3)
    waited = sum(line["waited"] * line["step_seconds"] for line in lines) / sum(seconds)
    assert taken["waited"] == pytest.approx(waited, abs=1e-3)
    assert taken["waited"] == pytest.approx(sum(taken["waits"].values()))
    steps = [line["step_seconds"] for line in whole(tmp_path)[STEPS_BEFORE:] if "traced" not in line]
    assert measured["step"] == pytest.approx(median(steps), rel=1e-3)
    assert 0 < measured["device compute"] < 10 * measured["step"]


def record_on_rank(rank: int, folder: Path) -> tuple[int, bool, int, dict[str, Any]]:
    model, optimizer = recorded(params="cpu", optimizer="nvme")
    with optimizer.record(folder) as recorder:
        for number in range(4):
            recorder.log(loss=one_step(model, optimizer, number), tokens=rank)
        own = optimizer.locations().bytes()
        observer = optimizer._engine.context.streams.observer
        assert isinstance(observer, Observer)
        kept = 0 if observer.waits is None else len(observer.waits._waits)
        assert recorder.steps == 4
        taken = recorder.take()
    optimizer.close()
    return own, recorder._lines is None, kept, taken


def test_of_several_ranks_the_first_writes_its_own_bytes_and_the_others_keep_no_waits(tmp_path: Path) -> None:
    """Their notes of waits grew with every step, and on a device each held two events."""
    (own, writes_not, _, taken), other = run_ranks(record_on_rank, 2, tmp_path)
    assert not writes_not
    assert taken.keys() >= {"step_seconds", "waited", "waits"}
    assert other[1:] == (True, 0, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "trace.json"]
    steps = whole(tmp_path)
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert sum(steps[-1]["bytes_by_tier"].values()) == own
    assert {line["tokens"] for line in written(tmp_path) if "tokens" in line} == {0}
    assert written(tmp_path, "start")[0]["world_size"] == 2
