"""What each method of `PenstockAccelerator` does, and what it refuses by name. Nothing here needs a second rank."""

import contextlib
import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, GradScalerKwargs
from accelerate.utils import ProjectConfiguration, TorchDynamoPlugin
from accelerate.utils.deepspeed import DummyOptim
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import penstock
from penstock.errors import CheckpointError, ConfigError, EngineError
from penstock.integrations import weights
from penstock.integrations.accelerate import PenstockAccelerator, PreparedOptimizer, pairs, settings
from tests.integrations.accelerate_loops import PLACEMENTS, fresh


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)


def ours(**arguments: Any) -> PenstockAccelerator:
    return PenstockAccelerator(penstock=arguments.pop("penstock", {}), **arguments)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=True,
        )
    )


# Preparing


def test_objects_in_any_order_come_back_in_it() -> None:
    accelerator, first, second = ours(), layers(), layers()
    for_second, for_first = adam(second), adam(first)
    schedule = torch.optim.lr_scheduler.StepLR(for_second, 1)
    loader = DataLoader(TensorDataset(torch.ones(4, 4)))
    made = accelerator.prepare(schedule, for_second, first, loader, "a word", for_first, second)
    assert made[2] is first
    assert made[6] is second
    assert made[4] == "a word"
    assert made[1].given is for_second
    assert made[5].given is for_first
    assert made[0].optimizers == [made[1]]  # of this scheduler, and not of all
    assert accelerator.optimizer_of(second) is made[1].optimizer
    assert isinstance(made[1], PreparedOptimizer)
    accelerator.free_memory()


def test_prepare_asks_for_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def state_dict(self: object) -> None:
        raise AssertionError("the whole state, on every rank")

    monkeypatch.setattr(penstock.Optimizer, "state_dict", state_dict)
    accelerator, model = ours(), layers()
    accelerator.prepare(model, adam(model))
    accelerator.free_memory()


def test_prepare_again_gives_the_same_pair() -> None:
    accelerator, model = ours(), layers()
    given = adam(model)
    model, optimizer = accelerator.prepare(model, given)
    assert accelerator.prepare(model, optimizer) == (model, optimizer)
    assert accelerator.prepare(given) is optimizer
    assert accelerator.prepare_model(model) is model
    assert (accelerator._models, accelerator._optimizers) == ([model], [optimizer])
    accelerator.free_memory()


def test_another_optimizer_closes_the_pair_before() -> None:
    accelerator, model = ours(), layers()
    _, first = accelerator.prepare(model, adam(model))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(first, 1))
    handle = weakref.ref(first.optimizer)
    second = accelerator.prepare(adam(model))
    with pytest.raises(EngineError, match="after close"):
        first.optimizer.locations()
    assert accelerator._optimizers == [second]
    assert schedule not in accelerator._schedulers
    del first, schedule
    assert handle() is None
    accelerator.backward(model(torch.ones(2, 4)).sum())
    assert not second.step().skipped
    accelerator.free_memory()


def test_a_pair_that_the_loop_closed_is_prepared_anew() -> None:
    accelerator, model = ours(), layers()
    given = adam(model)
    _, optimizer = accelerator.prepare(model, given)
    optimizer.optimizer.close()
    _, again = accelerator.prepare(model, given)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    assert again.step().grad_norm > 0
    accelerator.free_memory()


def test_free_memory_gives_everything_back() -> None:
    accelerator, model = ours(penstock={"placement": PLACEMENTS["cpu"]}), layers()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = set(model.__dict__)
    model, _ = accelerator.prepare(model, adam(model))
    accelerator.free_memory()
    assert set(model.__dict__) == attributes
    assert not model._forward_hooks
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert accelerator._models == accelerator._optimizers == []
    fresh()
    plain = Accelerator(cpu=True)
    assert plain.prepare(model) is model


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_outputs_are_fp32_as_accelerates_are(precision: str) -> None:
    accelerator, model = ours(penstock={"precision": precision}), layers()
    model, _ = accelerator.prepare(model, adam(model))
    assert accelerator.mixed_precision == precision
    with accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")
        assert model(torch.ones(2, 4)).dtype == torch.float32
    assert model[0].weight.dtype != torch.float32
    assert accelerator.scaler is None
    accelerator.free_memory()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 8), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        for block in self.blocks:
            values = torch.tanh(block(values))
        return values


@pytest.mark.parametrize("regional", [False, True])
def test_torch_compile_is_exact(regional: bool) -> None:
    def run(accelerator: Accelerator) -> tuple[list[float], dict[str, Any], list[str]]:
        torch.manual_seed(0)
        model: nn.Module = Blocks()
        model, optimizer = accelerator.prepare(model, adam(model))
        losses = []
        for _ in range(3):
            loss = model(torch.ones(2, 4)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        state = accelerator.get_state_dict(accelerator.unwrap_model(model, keep_torch_compile=False))
        return losses, {name: value.clone() for name, value in state.items()}, list(accelerator.get_state_dict(model))

    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    theirs = run(Accelerator(cpu=True, dynamo_plugin=plugin))
    fresh()
    accelerator = ours(dynamo_plugin=plugin, penstock={"placement": PLACEMENTS["cpu"]})
    mine = run(accelerator)
    accelerator.free_memory()
    assert mine[0] == pytest.approx(theirs[0], rel=1e-6)
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-6, atol=1e-6)
    assert mine[2] == theirs[2]


def test_a_model_that_was_compiled_before() -> None:
    accelerator = ours()
    model: nn.Module = torch.compile(layers(), backend="aot_eager")  # type: ignore[assignment]
    model, optimizer = accelerator.prepare(model, adam(model))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    assert optimizer.step().grad_norm > 0
    assert list(accelerator.get_state_dict(model)) == [f"_orig_mod.{name}" for name in layers().state_dict()]
    accelerator.free_memory()


# Training


def test_one_loss_through_two_models_trains_both() -> None:
    def run(accelerator: Accelerator) -> list[dict[str, Any]]:
        maker, judge = layers(), nn.Linear(2, 1)
        pairs = accelerator.prepare(maker, judge, adam(judge), adam(maker))
        for _ in range(2):
            accelerator.backward(pairs[1](pairs[0](torch.ones(3, 4))).square().mean())
            for optimizer in pairs[2:]:
                optimizer.step()
                optimizer.zero_grad()
        return [{n: v.clone() for n, v in accelerator.get_state_dict(model).items()} for model in pairs[:2]]

    theirs = run(Accelerator(cpu=True))
    fresh()
    torch.testing.assert_close(run(ours(penstock={"placement": PLACEMENTS["split"]})), theirs, rtol=1e-6, atol=1e-6)


def test_two_models_in_fp16_are_refused_by_name() -> None:
    accelerator, maker, judge = ours(penstock={"precision": "fp16"}), layers(), nn.Linear(2, 1)
    accelerator.prepare(maker, judge, adam(maker), adam(judge))
    with pytest.raises(ConfigError, match=r"2 models are trained in fp16.*optimizer_of"):
        accelerator.backward(judge(maker(torch.ones(2, 4))).sum())
    accelerator.free_memory()


def test_backward_retains_the_graph_where_it_is_told_to() -> None:
    accelerator, model = ours(), layers()
    model, optimizer = accelerator.prepare(model, adam(model))
    loss = model(torch.ones(2, 4)).sum()
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss)
    assert optimizer.step().grad_norm > 0
    accelerator.free_memory()


def test_clip_over_a_part_of_the_parameters_is_refused() -> None:
    accelerator, model, other = ours(), layers(), nn.Linear(2, 2)
    model, _ = accelerator.prepare(model, adam(model))
    loss = other(model(torch.ones(2, 4))).sum()
    accelerator.backward(loss)
    with pytest.raises(ConfigError, match="4 parameters of Sequential are missing"):
        accelerator.clip_grad_norm_(model[0].parameters(), 1.0)
    with pytest.raises(ConfigError, match="2 are of other modules"):
        accelerator.clip_grad_norm_([*model.parameters(), *other.parameters()], 1.0)
    assert accelerator.clip_grad_norm_(other.parameters(), 1e-3) > 0  # one that nobody prepared
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0, float("inf")).ndim == 0
    accelerator.free_memory()


def test_clip_before_the_last_micro_batch_is_refused() -> None:
    accelerator, model = ours(gradient_accumulation_steps=2), layers()
    model, optimizer = accelerator.prepare(model, adam(model))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        with pytest.raises(EngineError, match=r"accelerator\.sync_gradients"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        assert optimizer.step() is None
    accelerator.free_memory()


def test_clip_grad_value_is_refused() -> None:
    accelerator, model = ours(), layers()
    accelerator.prepare(model, adam(model))
    with pytest.raises(ConfigError, match=r"clip_grad_value_.*clip_grad_norm_"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    other = nn.Linear(2, 2)  # one that nobody prepared
    accelerator.backward(other(torch.full((1, 2), 5.0)).sum())
    accelerator.clip_grad_value_(other.parameters(), 1.0)
    assert other.weight.grad is not None
    assert other.weight.grad.max() == 1.0
    accelerator.free_memory()


def test_skipped_step_is_told_to_scheduler_and_accelerator() -> None:
    accelerator, model = ours(), layers()
    given = adam(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(given, lambda step: 1 / (1 + step))
    model, optimizer, schedule = accelerator.prepare(model, given, schedule)
    accelerator.backward(model(torch.full((2, 4), float("nan"))).sum())
    with pytest.warns(UserWarning, match="not finite"):
        assert optimizer.step().skipped
    schedule.step()
    assert accelerator.optimizer_step_was_skipped
    assert schedule.get_last_lr() == [1e-2]
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    schedule.step()
    assert not accelerator.optimizer_step_was_skipped
    assert schedule.get_last_lr() == [5e-3]
    accelerator.free_memory()


# Saving


@pytest.mark.parametrize("placement", ["cpu", "nvme"])
def test_save_pretrained_in_shards(placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "GATHER_BYTES", 20_000)
    accelerator, model = ours(penstock={"placement": PLACEMENTS[placement], "stage": 3}), llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model, _ = accelerator.prepare(model, adam(model))
    state = accelerator.get_state_dict(model)
    assert list(state) == list(before)
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    unwrapped: Any = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        tmp_path, state_dict=state, is_main_process=accelerator.is_main_process, max_shard_size="20KB"
    )
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    accelerator.free_memory()
    again = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(dict(again.state_dict()), before, rtol=0, atol=0)


def stepped(accelerator: PenstockAccelerator, model: nn.Module) -> Any:
    """Train a step, so that weights have more than 16 bits."""
    model, optimizer = accelerator.prepare(model, adam(model))
    accelerator.backward(model(input_ids=torch.ones(2, 4, dtype=torch.int64)).logits.square().mean())
    optimizer.step()
    return model


@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("placement", ["device", "cpu", "nvme"])
def test_the_last_save_pretrained_of_a_script(placement: str, loaded: torch.dtype, tmp_path: Path) -> None:
    accelerator = ours(mixed_precision="bf16", penstock={"placement": PLACEMENTS[placement]})
    model = stepped(accelerator, llama().to(loaded))
    unwrapped: Any = accelerator.unwrap_model(model)
    main = accelerator.is_main_process
    unwrapped.save_pretrained(tmp_path / "a", is_main_process=main, save_function=accelerator.save)
    if main:
        unwrapped.save_pretrained(tmp_path / "b", state_dict=accelerator.get_state_dict(model))
        unwrapped.save_pretrained(tmp_path / "c", max_shard_size="20KB")
    accelerator.save_model(model, tmp_path / "d")
    unwrapped.save_pretrained(tmp_path / "no", is_main_process=False)
    assert not (tmp_path / "no").exists()
    accelerator.free_memory()
    assert "save_pretrained" not in vars(model)
    assert "state_dict" not in vars(model)
    expected = dict(model.state_dict())
    for name in "abc":
        again = LlamaForCausalLM.from_pretrained(tmp_path / name)
        assert again.dtype == loaded
        torch.testing.assert_close(dict(again.state_dict()), expected, rtol=0, atol=0)
    written = load_file(tmp_path / "d" / "model.safetensors")
    torch.testing.assert_close(written, {name: expected[name] for name in written}, rtol=0, atol=0)


def test_save_pretrained_of_classes_without_a_state_dict_argument(tmp_path: Path) -> None:
    class Own(nn.Sequential):
        def save_pretrained(self, folder: Path) -> None:
            torch.save(self.state_dict(), folder / "own.pt")

    accelerator, model = ours(penstock={"placement": PLACEMENTS["cpu"]}), Own(nn.Linear(4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model, _ = accelerator.prepare(model, adam(model))
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(torch.load(tmp_path / "own.pt"), before, rtol=0, atol=0)
    accelerator.free_memory()


def test_save_pretrained_of_adapters_gathers_them_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    accelerator = ours(penstock={"placement": PLACEMENTS["cpu"]})
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model = stepped(accelerator, model)
    gathered: list[int] = []
    original = accelerator.gather_entries
    monkeypatch.setattr(accelerator, "gather_entries", lambda *a, **k: gathered.append(len(a[1])) or original(*a, **k))
    model.save_pretrained(tmp_path, is_main_process=True)
    accelerator.free_memory()
    expected = peft.get_peft_model_state_dict(model)
    assert gathered == [len(expected)]
    torch.testing.assert_close(load_file(tmp_path / "adapter_model.safetensors"), dict(expected), rtol=0, atol=0)


def test_state_in_files_leaves_none_behind(tmp_path: Path) -> None:
    folder = tmp_path / "disk"  # where nobody else makes files
    folder.mkdir()
    accelerator, model = ours(penstock={"placement": {**PLACEMENTS["nvme"], "nvme_path": str(folder)}}), layers()
    model, _ = accelerator.prepare(model, adam(model))
    names = set(folder.iterdir())
    state = accelerator.get_state_dict(model)
    assert set(folder.iterdir()) == names
    mapped = Path("/proc/self/maps").read_text()
    assert sum(str(folder) in line and "(deleted)" in line for line in mapped.splitlines()) >= len(state)
    del state
    accelerator.free_memory()


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["20KB", "1GB"])
def test_save_model_writes_what_accelerate_writes(safe: bool, size: str, tmp_path: Path) -> None:
    plain = Accelerator(cpu=True)
    plain.save_model(plain.prepare(llama()), tmp_path / "theirs", max_shard_size=size, safe_serialization=safe)
    fresh()
    accelerator, model = ours(penstock={"placement": PLACEMENTS["cpu"]}), llama()
    model, _ = accelerator.prepare(model, adam(model))
    (tmp_path / "ours").mkdir()
    stale = tmp_path / "ours" / ("model-00001-of-00099.safetensors" if safe else "pytorch_model-00001-of-00099.bin")
    stale.write_bytes(b"of a save before")
    accelerator.save_model(model, tmp_path / "ours", max_shard_size=size, safe_serialization=safe)
    accelerator.free_memory()
    theirs, mine = (sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("theirs", "ours"))
    if safe or size == "1GB":  # torch's format repeats tied weights that accelerate puts into one file
        assert mine == theirs
    for name in mine if safe else ():
        if name.endswith(".json"):
            assert json.loads((tmp_path / "ours" / name).read_text()) == json.loads(
                (tmp_path / "theirs" / name).read_text()
            )
        else:
            torch.testing.assert_close(
                load_file(tmp_path / "ours" / name), load_file(tmp_path / "theirs" / name), rtol=0, atol=0
            )


def test_automatic_names_limit_hooks_and_custom_objects(tmp_path: Path) -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator, model, counter = ours(project_config=project), layers(), Counter()
    seen: list[Any] = []
    accelerator.register_for_checkpointing(counter)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: seen.append((models, weights, folder)))
    accelerator.register_load_state_pre_hook(lambda models, folder: seen.append((models, folder)))
    model, optimizer = accelerator.prepare(model, adam(model))
    values = []
    for number in range(3):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
        counter.count = number
        values.append(accelerator.get_state_dict(model)["0.weight"])
        accelerator.save_state(blocking=number != 1)
    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["checkpoint_1", "checkpoint_2"]
    assert seen[2] == ([model], [{}], str(folders[1]))
    accelerator.load_state(str(folders[0]))
    assert counter.count == 1
    assert torch.equal(accelerator.get_state_dict(model)["0.weight"], values[1])
    assert seen[3] == ([model], str(folders[0]))
    accelerator.load_state()  # the newest
    assert counter.count == 2
    assert (accelerator._models, accelerator._optimizers) == ([model], [optimizer])
    accelerator.free_memory()


def test_several_models_are_saved_each(tmp_path: Path) -> None:
    accelerator, maker, judge = ours(), layers(), nn.Linear(2, 1)
    maker, judge, _, _ = accelerator.prepare(maker, judge, adam(maker), adam(judge))
    accelerator.save_state(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} >= {"penstock", "penstock_1"}
    before = accelerator.get_state_dict(judge)
    with accelerator.optimizer_of(judge).gathered(modify=True):
        nn.init.zeros_(judge.weight)
    accelerator.load_state(str(tmp_path))
    torch.testing.assert_close(accelerator.get_state_dict(judge), before, rtol=0, atol=0)
    accelerator.free_memory()
    fresh()
    one, model = ours(), layers()
    one.prepare(model, adam(model))
    with pytest.raises(CheckpointError, match="more than 1 checkpoints"):
        one.load_state(str(tmp_path))
    one.free_memory()


def test_a_state_of_plain_accelerate_is_refused(tmp_path: Path) -> None:
    plain, model = Accelerator(cpu=True), layers()
    plain.prepare(model, adam(model))
    plain.save_state(str(tmp_path))
    fresh()
    accelerator, model = ours(), layers()
    accelerator.prepare(model, adam(model))
    with pytest.raises(CheckpointError, match=r"0 checkpoints.*model\.safetensors"):
        accelerator.load_state(str(tmp_path))
    assert accelerator._models == [model]
    accelerator.free_memory()


# What is refused by name

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown argument": (lambda: ours(penstock={"placment": {}}), "Did you mean 'placement'"),
    "unknown option": (lambda: ours(penstock={"options": {"tile_byte": 1}}), "Did you mean 'tile_bytes'"),
    "the model in the arguments": (lambda: ours(penstock={"model": layers()}), "where it is prepared"),
    "two precisions": (
        lambda: ours(mixed_precision="fp16", penstock={"precision": "bf16"}),
        "mixed_precision='fp16'.*Say it once",
    ),
    "no precision beside one": (
        lambda: ours(mixed_precision="no", penstock={"precision": "bf16"}),
        "mixed_precision='no'.*'fp32'",
    ),
    "a precision that there is not": (lambda: ours(penstock={"precision": "bf8"}), "'bf8'.*use one of 'fp32'"),
    "fp8": (lambda: ours(mixed_precision="fp8"), "use 'no'"),
    "a scaler": (lambda: ours(kwargs_handlers=[GradScalerKwargs()]), "no GradScaler"),
    "DeepSpeed": (lambda: ours(deepspeed_plugin=object()), "deepspeed_plugin.*convert-config"),
    "FSDP": (lambda: ours(fsdp_plugin=object()), "fsdp_plugin.*convert-config"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_accelerator_refuses(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("name", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"])
def test_a_launch_with_somebody_elses_configuration_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(ConfigError, match=f"ACCELERATE_USE_{name}.*convert-config"):
        ours()


def test_precision_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ours().mixed_precision == "no"
    fresh()
    assert ours(mixed_precision="bf16").prepare_arguments["precision"] == "bf16"
    fresh()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # what launchers set where nothing was chosen
    assert ours(penstock={"precision": "bf16"}).mixed_precision == "bf16"
    fresh()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert ours().prepare_arguments["precision"] == "fp16"
    fresh()
    with pytest.raises(ConfigError, match="ACCELERATE_MIXED_PRECISION=fp16"):
        ours(penstock={"precision": "bf16"})


def test_harmless_handlers_are_taken() -> None:
    assert ours(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]).scaler is None


def offloaded() -> nn.Module:
    model = layers()
    model.hf_device_map = {"0": "cpu", "1": "disk"}
    return model


def one_over_two() -> list[Any]:
    first, second = layers(), layers()
    return [first, second, torch.optim.AdamW([*first.parameters(), *second.parameters()])]


def two_over_one() -> list[Any]:
    model = layers()
    return [model, adam(model[0]), adam(model[1])]


def nested() -> list[Any]:
    model = layers()
    return [model, model[0], adam(model)]


def prepared_before() -> list[Any]:
    model = layers()
    return [model, penstock.prepare(model, adam(model), precision="fp32")]


def with_model(make: Callable[[nn.Module], Any]) -> Callable[[], list[Any]]:
    def made() -> list[Any]:
        model = layers()
        return [make(model), adam(model)]

    return made


PREPARED: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "an optimizer of no model": (lambda: [adam(layers())], "that no prepared model has"),
    "an optimizer of two models": (one_over_two, "trains parameters of 2 models"),
    "two optimizers of a model": (two_over_one, "AdamW and AdamW both train parameters of Sequential"),
    "a model and its part": (nested, "share the parameter"),
    "a prepared optimizer": (prepared_before, "what penstock.prepare.. returned"),
    "DataParallel": (with_model(nn.DataParallel), "wrapped in DataParallel"),
    "a device map": (lambda: [offloaded()], "device_map"),
    "16 bits, and no precision": (with_model(nn.Module.bfloat16), "no precision was said"),
    "an optimizer of DeepSpeed's configuration": (lambda: [DummyOptim([])], "DummyOptim"),
}


@pytest.mark.parametrize("case", PREPARED)
def test_prepare_refuses(case: str) -> None:
    make, message = PREPARED[case]
    accelerator, things = ours(), make()
    with pytest.raises(ConfigError, match=message):
        accelerator.prepare(*things)
    assert accelerator._pairs == accelerator._models == []
    for thing in things:
        if isinstance(thing, penstock.Optimizer):
            thing.close()


def test_model_and_accelerator_are_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Placed(nn.Linear):
        def parameters(self, recurse: bool = True) -> Any:
            return iter([SimpleNamespace(device=torch.device("cuda", 1), dtype=torch.float32)])

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    for same in (torch.device("cuda", 1), torch.device("cuda")):
        pairs.check_model(Placed(1, 1), same, chooses_precision=False)
    for other in (torch.device("cuda", 0), torch.device("cpu")):
        with pytest.raises(ConfigError, match=f"lie on cuda:1, and the accelerator is on {other}"):
            pairs.check_model(Placed(1, 1), other, chooses_precision=False)


def test_cpus_beside_an_accelerator_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        settings.check_machine(torch.device("cpu"), 1, None)
    settings.check_machine(torch.device("cpu"), 1, SimpleNamespace(device_type="cpu"))
    settings.check_machine(torch.device("cuda"), 1, None)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "accelerate.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec("".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {})
    assert (tmp_path / "state" / "penstock").is_dir()
    assert (tmp_path / "weights" / "model.safetensors").is_file()


def test_what_one_call_gives_is_prepared_together_or_not() -> None:
    accelerator, first, second = ours(), layers(), layers()
    of_second = torch.optim.LBFGS(second.parameters())
    with pytest.raises(ConfigError, match="LBFGS"):
        accelerator.prepare(first, second, adam(first), of_second)
    assert accelerator._pairs == []
    first, _ = accelerator.prepare(first, adam(first))  # it is nobody's
    accelerator.free_memory()


def test_uneven_inputs_on_one_rank_are_even() -> None:
    accelerator, model = ours(), layers()
    model, _ = accelerator.prepare(model, adam(model))
    with contextlib.suppress(UserWarning), accelerator.join_uneven_inputs([model]):
        pass
    accelerator.free_memory()


@pytest.mark.parametrize("method", ["save_state", "load_state"])
def test_arguments_for_state_dicts_are_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'strict'"):
        getattr(ours(), method)(str(tmp_path), strict=False)
