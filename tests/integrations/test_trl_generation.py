"""What moves when a trainer of TRL's generates, what a vLLM beside it gets, and ranks that stop at different tokens."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

import penstock
from penstock.errors import EngineError
from penstock.integrations import generation, trl
from tests.integrations import trl_cases as cases
from tests.integrations.test_trl import CPU, LORA
from tests.lib.memory import disks
from tests.lib.ranks import run_ranks

ON_DEVICE = {"optimizer": "device", "grads": "device"}
HALF_ON_NVME = {"optimizer": {"device": 0.5, "nvme": 0.5}, "params": "cpu", "nvme_path": str(disks()[0])}
ALL_ON_NVME = {"optimizer": "nvme", "params": "nvme", "grads": "cpu", "nvme_path": str(disks()[0])}


def at_rest(optimizer: penstock.Optimizer) -> dict[str, dict[str, int]]:
    """The bytes of each kind on each tier."""
    report = optimizer.locations()
    kinds = ("param", "grad", "master", "optimizer")
    return {kind: {tier: report.bytes(kind=kind, tier=tier) for tier in ("device", "cpu", "nvme")} for kind in kinds}


@pytest.fixture
def trainer(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A trainer of GRPO's that has made a step, so that there is a state."""
    monkeypatch.setenv("CI", "1")
    cases.folder_of(cases.causal(), tmp_path / "model")
    placement, options, *released = request.param
    if released:  # parameters go after each use, as on a device
        monkeypatch.setenv("PENSTOCK_DEBUG_RELEASE", "1")
    made = cases.trainer_of("grpo", {"placement": placement}, tmp_path, max_steps=1, warmup_steps=0, **options)
    made.train()
    yield made
    made.penstock.close()


def states(trainer: Any) -> list[Tensor]:
    optimizer = trainer.penstock
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    return [optimizer.full_state(p, name) for p in trained for name in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("trainer", [(HALF_ON_NVME, {}), (ALL_ON_NVME, {})], indirect=True)
def test_state_makes_room_on_the_device_and_is_where_it_was_afterwards(trainer: Any) -> None:
    optimizer = trainer.penstock
    before, values = at_rest(optimizer), states(trainer)
    assert (before["optimizer"]["device"] > 0) == (before["param"]["nvme"] == 0)
    expected = [optimizer.full_param(p) for p in trainer.model.parameters()]
    with trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False):
        meanwhile = at_rest(optimizer)
        whole = [p.detach().clone() for p in trainer.model.parameters()]
    for kind in ("grad", "master", "optimizer"):
        assert meanwhile[kind]["device"] == 0
        moved = before[kind]["device"]
        assert meanwhile[kind]["nvme"] >= before[kind]["nvme"]  # nothing of it came to the host's memory
        assert meanwhile[kind]["cpu"] >= before[kind]["cpu"] + (moved if not before[kind]["nvme"] else 0)
    assert all(torch.equal(a, b) for a, b in zip(whole, expected, strict=True))
    assert at_rest(optimizer) == before
    assert all(torch.equal(a, b) for a, b in zip(states(trainer), values, strict=True))


@pytest.mark.parametrize("trainer", [(ON_DEVICE, {})], indirect=True)
def test_an_exception_while_generating_leaves_all_as_it_was(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "free_bytes", lambda device: 0)
    with generation.generating(trainer.accelerator, trainer.penstock, trainer.model) as found:
        assert found  # it rests whole on the device
    before = at_rest(trainer.penstock)
    with pytest.raises(KeyError), trainer._dist.summon_full_params(trainer.model_wrapped):
        raise KeyError
    assert at_rest(trainer.penstock) == before
    assert "generate" not in vars(trainer.model)


@pytest.mark.parametrize("trainer", [(CPU["placement"], {})], indirect=True)
def test_a_model_that_does_not_fit_whole_is_gathered_for_each_token(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    for free, is_whole in ((size / generation.WHOLE_SHARE + 8, True), (size / generation.WHOLE_SHARE - 8, False)):
        monkeypatch.setattr(generation, "free_bytes", lambda device, free=free: free)
        with generation.generating(trainer.accelerator, trainer.penstock, trainer.model) as found:
            assert found is is_whole
    with generation.generating(trainer.accelerator, trainer.penstock, trainer.model, whole=False) as found:
        assert not found


# vLLM, which is not here: its weights, and when it wakes and sleeps, by a stand-in under TRL's own class


class SleepingLLM:
    """A vLLM that sleeps between generations: notes what of the trainer's state is on the device at each call."""

    def __init__(self, optimizer: penstock.Optimizer) -> None:
        self._optimizer = optimizer
        self.weights: dict[str, Tensor] = {}
        self.calls: list[tuple[str, int]] = []
        self.most_gathered = 0
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(
                driver_worker=SimpleNamespace(
                    model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=self.load))
                )
            )
        )

    def load(self, weights: list[tuple[str, Tensor]]) -> None:
        self.weights |= {name: value.clone() for name, value in weights}
        self.note("load")

    def note(self, call: str) -> None:
        at = at_rest(self._optimizer)
        self.most_gathered = max(self.most_gathered, self._optimizer.locations().bytes(kind="gathered"))
        self.calls.append((call, sum(at[kind]["device"] for kind in ("grad", "master", "optimizer"))))

    def wake_up(self, tags: list[str]) -> None:
        self.note(f"wake {tags[0]}")

    def sleep(self, level: int) -> None:
        self.note("sleep")

    def reset_prefix_cache(self) -> None:
        self.note("reset")

    def generate(self, prompts: Any, **rest: Any) -> list[Any]:
        self.note("generate")
        answer = SimpleNamespace(token_ids=[5, 1], logprobs=None)
        return [SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[answer]) for prompt in prompts]


def beside_vllm(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> SleepingLLM:
    """Give a trainer TRL's object around a vLLM that sleeps, as its constructor would."""
    monkeypatch.setattr(vllm_generation, "SamplingParams", lambda **given: given, raising=False)
    monkeypatch.setattr(vllm_generation, "empty_cache", lambda: None)
    monkeypatch.setattr(vllm_generation, "extract_logprobs", lambda outputs: (None, None))
    monkeypatch.setattr(VLLMGeneration, "_init_vllm", lambda self: None)
    engine = VLLMGeneration(trainer.model, trainer.accelerator, None, mode="colocate", enable_sleep_mode=True)
    engine.llm, engine._llm_weights_sleeping = SleepingLLM(trainer.penstock), True
    trainer.vllm_generation = engine
    trainer._wrap_model(trainer.model)  # as before each training and evaluation
    return engine.llm


@pytest.mark.parametrize("trainer", [(ON_DEVICE, {}), (CPU["placement"], {}, True)], indirect=True)
def test_state_makes_room_while_vllm_is_awake(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = at_rest(trainer.penstock)
    expected = {name: trainer.penstock.full_param(p) for name, p in trainer.model.named_parameters()}
    monkeypatch.setattr(trl, "GATHER_BYTES", 8192)  # several batches of parameters
    llm = beside_vllm(trainer, monkeypatch)
    for _ in range(2):  # the second wakes what the first put to sleep
        trainer.vllm_generation.generate([[4, 5]], None, 1)
    assert [call for call, _ in llm.calls if call != "load"] == 2 * [
        "wake weights",
        "reset",
        "wake kv_cache",
        "generate",
        "sleep",
    ]
    assert not any(left for _, left in llm.calls)
    assert llm.weights.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in llm.weights.items())
    assert llm.most_gathered < sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    assert at_rest(trainer.penstock) == before


@pytest.mark.parametrize("trainer", [(CPU["placement"], LORA, True)], indirect=True)
def test_vllm_gets_merged_weights_and_the_base_stays_bit_for_bit(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = trainer.penstock
    before = {name: optimizer.full_param(p) for name, p in trainer.model.named_parameters()}
    llm = beside_vllm(trainer, monkeypatch)
    trainer.vllm_generation.sync_weights()
    assert all(torch.equal(optimizer.full_param(p), before[name]) for name, p in trainer.model.named_parameters())
    name = "model.layers.0.self_attn.q_proj"
    factors = [before[f"base_model.model.{name}.lora_{part}.default.weight"] for part in "BA"]
    merged = before[f"base_model.model.{name}.base_layer.weight"] + 2.0 * factors[0] @ factors[1]
    torch.testing.assert_close(llm.weights[f"{name}.weight"], merged)
    assert not torch.equal(llm.weights[f"{name}.weight"], before[f"base_model.model.{name}.base_layer.weight"])


# Ranks that stop at different tokens, and after different numbers of answers


def uneven(rank: int, folder: Path) -> Any:
    """Rank 0 answers with one token, rank 1 with as many as there may be; whole, and gathered for each token."""
    stops = {"eos_token_id": list(range(64))} if rank == 0 else {"eos_token_id": 1, "suppress_tokens": [1]}
    options = {"generation_kwargs": stops, "beta": 0.1}
    runs = [cases.run("grpo", CPU, folder, ds3_gather_for_generation=whole, **options) for whole in (True, False)]
    return cases.run("grpo", None, folder, **options), runs


def test_answers_of_different_lengths_on_two_ranks(tmp_path: Path) -> None:
    cases.folder_of(cases.causal(), tmp_path / "model")
    for rank, (theirs, runs) in enumerate(run_ranks(uneven, 2, tmp_path, timeout=timedelta(minutes=3), fresh=True)):
        for ours in runs:
            cases.same(ours, theirs, 1e-5)
        assert rank == 0 or theirs.logs[0]["completions/max_length"] == 6


@pytest.mark.parametrize("trainer", [(CPU["placement"], {})], indirect=True)
def test_ranks_with_different_numbers_of_forwards_of_units_are_refused(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "free_bytes", lambda device: 0)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.raises(EngineError, match="3 prompts for 2 ranks"), trainer.accelerator.split_between_processes("abc"):
        pass
    trainer.use_transformers_continuous_batching = True
    with pytest.raises(EngineError, match="continuous_batching"), trainer._dist.summon_full_params(trainer.model):
        pass


# Scripts of somebody else


SCRIPT = """
import sys
from pathlib import Path
from tests.integrations import trl_cases as cases

trainer = cases.trainer_of("grpo", None, Path(sys.argv[1]), beta=0.1)
trainer.train()
reference = trainer.accelerator.optimizer_of(trainer.ref_model)
assert reference.locations().bytes(tier="nvme") and trainer.penstock.locations().bytes(tier="nvme")
norms = [line["grad_norm"] for line in trainer.state.log_history if "loss" in line]
print("norms", norms, type(trainer._dist).__name__)
"""


def test_a_script_that_knows_nothing_of_it_is_launched(tmp_path: Path) -> None:
    """The mixin is below TRL's classes then, and what it does beside them the same."""
    cases.folder_of(cases.causal(), tmp_path / "model")
    (tmp_path / "script.py").write_text(SCRIPT)
    config = tmp_path / "penstock.json"
    config.write_text(json.dumps({"placement": {"params": "nvme", "optimizer": "nvme", "nvme_path": str(disks()[0])}}))
    command = [sys.executable, "-m", "penstock", "launch", "--config", config, tmp_path / "script.py", tmp_path]
    root = Path(__file__).parents[2]
    paths = os.pathsep.join((str(root), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        command, env=os.environ | {"CI": "1", "PYTHONPATH": paths}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    plain = cases.run("grpo", None, tmp_path, beta=0.1)
    norms, whole = re.search(r"^norms (\[.*\]) (\w+)$", done.stdout, re.MULTILINE).groups()  # type: ignore[union-attr]
    assert whole == "WholeParameters"
    assert json.loads(norms) == pytest.approx([line["grad_norm"] for line in plain.logs if "loss" in line], rel=1e-5)
