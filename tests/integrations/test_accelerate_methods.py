"""What each method of `PenstockAccelerator` does, and what it refuses by name. Nothing here needs a second rank."""

import contextlib
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, GradScalerKwargs
from accelerate.utils import ProjectConfiguration, TorchDynamoPlugin
from accelerate.utils.deepspeed import DummyOptim
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaForCausalLM

import penstock
from penstock.errors import CheckpointError, ConfigError, EngineError
from penstock.integrations import weights
from penstock.integrations.accelerate import PenstockAccelerator, PreparedOptimizer
from tests.integrations.accelerate_loops import PLACEMENTS, fresh
from tests.lib.models import Blocks, llama
from tests.lib.refusals import Refusal, refused, rows


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


def pair(**arguments: Any) -> tuple[PenstockAccelerator, Any, Any]:
    """An accelerator, and a model with its optimizer that it has prepared."""
    accelerator, model = ours(**arguments), layers()
    return accelerator, *accelerator.prepare(model, adam(model))


def train_once(accelerator: PenstockAccelerator, model: Any, optimizer: Any) -> Any:
    accelerator.backward(model(torch.ones(2, 4)).sum())
    result = optimizer.step()
    optimizer.zero_grad()
    return result


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
    assert not train_once(accelerator, model, second).skipped
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
    accelerator, model, _ = pair(
        penstock={"precision": precision},
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],  # harmless
    )
    assert accelerator.mixed_precision == precision
    with accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")
        assert model(torch.ones(2, 4)).dtype == torch.float32
    assert model[0].weight.dtype != torch.float32
    assert accelerator.scaler is None
    with contextlib.suppress(UserWarning), accelerator.join_uneven_inputs([model]):  # even on one rank
        pass
    accelerator.free_memory()


@pytest.mark.parametrize("regional", [False, True])
def test_torch_compile_is_exact(regional: bool) -> None:
    def run(accelerator: Accelerator) -> tuple[list[float], dict[str, Any], list[str]]:
        model: Any = Blocks()
        model, optimizer = accelerator.prepare(model, adam(model))
        losses = []
        for _ in range(2):
            loss = model(torch.ones(2, 8)).square().mean()
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


# Saving


def tied_llama() -> Any:
    return llama(tie_word_embeddings=True)


def stepped(accelerator: PenstockAccelerator, model: Any) -> Any:
    """Train a step, so that weights have more than 16 bits."""
    model, optimizer = accelerator.prepare(model, adam(model))
    accelerator.backward(model(input_ids=torch.ones(2, 4, dtype=torch.int64)).logits.square().mean())
    optimizer.step()
    return model


@pytest.mark.parametrize(
    ("placement", "loaded"),
    [("device", torch.float32), ("cpu", torch.bfloat16), ("nvme", torch.float32)],
    ids=lambda value: str(value),
)
def test_the_last_save_pretrained_of_a_script(
    placement: str, loaded: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "GATHER_BYTES", 20_000)
    accelerator = ours(mixed_precision="bf16", penstock={"placement": PLACEMENTS[placement]})
    model = stepped(accelerator, tied_llama().to(loaded))
    state = accelerator.get_state_dict(model)
    assert list(state) == list(tied_llama().state_dict())
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    unwrapped: Any = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(tmp_path / "a", is_main_process=True, save_function=accelerator.save)
    unwrapped.save_pretrained(tmp_path / "b", state_dict=state)
    unwrapped.save_pretrained(tmp_path / "c", max_shard_size="20KB")
    unwrapped.save_pretrained(tmp_path / "no", is_main_process=False)
    assert not (tmp_path / "no").exists()
    assert len(list((tmp_path / "c").glob("model-*.safetensors"))) > 2
    accelerator.free_memory()
    assert not {"save_pretrained", "state_dict"} & vars(model).keys()
    expected = dict(model.state_dict())
    for name in "abc":
        again = LlamaForCausalLM.from_pretrained(tmp_path / name)
        assert again.dtype == loaded
        torch.testing.assert_close(dict(again.state_dict()), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("safe", "size"), [(True, "20KB"), (True, "1GB"), (False, "20KB")])
def test_save_model_writes_what_accelerate_writes(safe: bool, size: str, tmp_path: Path) -> None:
    plain = Accelerator(cpu=True)
    plain.save_model(plain.prepare(tied_llama()), tmp_path / "theirs", max_shard_size=size, safe_serialization=safe)
    fresh()
    accelerator, model = ours(penstock={"placement": PLACEMENTS["cpu"]}), tied_llama()
    model, _ = accelerator.prepare(model, adam(model))
    (tmp_path / "ours").mkdir()
    stale = tmp_path / "ours" / ("model-00001-of-00099.safetensors" if safe else "pytorch_model-00001-of-00099.bin")
    stale.write_bytes(b"of a save before")
    accelerator.save_model(model, tmp_path / "ours", max_shard_size=size, safe_serialization=safe)
    accelerator.free_memory()
    theirs, mine = (sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("theirs", "ours"))
    if safe:  # torch's format repeats tied weights that accelerate puts into one file
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
        train_once(accelerator, model, optimizer)
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


# What is refused by name


def offloaded() -> nn.Module:
    model = layers()
    model.hf_device_map = {"0": "cpu", "1": "disk"}
    return model


def prepare(*make: Callable[[nn.Module], Any]) -> Callable[[Path], None]:
    """Prepare what is made of one model; nothing of it is kept."""

    def do(_: Path) -> None:
        accelerator, model = ours(), layers()
        try:
            accelerator.prepare(*(each(model) for each in make))
        finally:
            assert accelerator._pairs == accelerator._models == []

    return do


def itself(model: nn.Module) -> nn.Module:
    return model


def launched_by(name: str) -> Callable[[Path], None]:
    def do(_: Path) -> None:
        os.environ[f"ACCELERATE_USE_{name}"] = "true"
        ours()

    return do


def clip(parameters: Callable[[Any, Any], Any]) -> Callable[[Path], None]:
    def do(_: Path) -> None:
        accelerator, model, _ = pair()
        other = nn.Linear(2, 2)
        accelerator.backward(other(model(torch.ones(2, 4))).sum())
        assert accelerator.clip_grad_norm_(other.parameters(), 1e-3) > 0  # one that nobody prepared
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0, float("inf")).ndim == 0
        accelerator.clip_grad_norm_(parameters(model, other), 1.0)

    return do


def clip_values(_: Path) -> None:
    accelerator, model, _ = pair()
    other = nn.Linear(2, 2)
    accelerator.backward(other(torch.full((1, 2), 5.0)).sum())
    accelerator.clip_grad_value_(other.parameters(), 1.0)
    assert other.weight.grad is not None
    assert other.weight.grad.max() == 1.0
    accelerator.clip_grad_value_(model.parameters(), 1.0)


def clip_before_the_last_micro_batch(_: Path) -> None:
    accelerator, model, optimizer = pair(gradient_accumulation_steps=2)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        assert optimizer.step() is None
        accelerator.clip_grad_norm_(model.parameters(), 1.0)


def two_in_fp16(_: Path) -> None:
    accelerator, maker, judge = ours(penstock={"precision": "fp16"}), layers(), nn.Linear(2, 1)
    accelerator.prepare(maker, judge, adam(maker), adam(judge))
    accelerator.backward(judge(maker(torch.ones(2, 4))).sum())


def state_of_accelerate(folder: Path) -> None:
    plain, model = Accelerator(cpu=True), layers()
    plain.prepare(model, adam(model))
    plain.save_state(str(folder))
    fresh()
    pair()[0].load_state(str(folder))


def made(**arguments: Any) -> Callable[[Path], Any]:
    return lambda _: ours(**arguments)


OTHER = layers()


REFUSED = {
    "unknown argument": Refusal(made(penstock={"placment": {}}), "Did you mean 'placement'"),
    "the model in the arguments": Refusal(made(penstock={"model": layers()}), "where it is prepared"),
    "two precisions": Refusal(made(mixed_precision="fp16", penstock={"precision": "bf16"}), "Say it once"),
    "fp8": Refusal(made(mixed_precision="fp8"), "use 'no'"),
    "a scaler": Refusal(made(kwargs_handlers=[GradScalerKwargs()]), "no GradScaler"),
    **{
        f"{name}_plugin": Refusal(made(**{f"{name}_plugin": object()}), "convert-config")
        for name in ("deepspeed", "fsdp")
    },
    **{
        name: Refusal(launched_by(name), f"ACCELERATE_USE_{name}")
        for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")
    },
    "an optimizer of two models": Refusal(
        prepare(lambda model: model[:2], lambda model: model[2], adam), "trains parameters of 2 models"
    ),
    "two optimizers of a model": Refusal(
        prepare(itself, lambda model: adam(model[0]), lambda model: adam(model[1])),
        "AdamW and AdamW both train parameters of Sequential",
    ),
    "a model and its part": Refusal(prepare(itself, lambda model: model[0], adam), "share the parameter"),
    "DataParallel": Refusal(prepare(nn.DataParallel, adam), "wrapped in DataParallel"),
    "a device map": Refusal(prepare(lambda _: offloaded()), "device_map"),
    "16 bits, and no precision": Refusal(prepare(nn.Module.bfloat16, adam), "no precision was said"),
    "an optimizer of DeepSpeed's configuration": Refusal(prepare(lambda _: DummyOptim([])), "DummyOptim"),
    "one pair of two, so both": Refusal(
        prepare(itself, adam, lambda _: OTHER, lambda _: torch.optim.LBFGS(OTHER.parameters())), "LBFGS"
    ),
    "two models in fp16": Refusal(two_in_fp16, "2 models are trained in fp16"),
    "clipping of a part": Refusal(clip(lambda model, other: model[0].parameters()), "4 parameters of Sequential are"),
    "clipping of values": Refusal(clip_values, "clip_grad_norm_"),
    "clipping before the last micro-batch": Refusal(
        clip_before_the_last_micro_batch, "accelerator.sync_gradients", EngineError
    ),
    "a state of accelerate's": Refusal(state_of_accelerate, "0 checkpoints", CheckpointError),
    **{
        f"{method} of state dicts": Refusal(
            lambda folder, method=method: getattr(ours(), method)(str(folder), strict=False),
            "unexpected keyword argument 'strict'",
            TypeError,
        )
        for method in ("save_state", "load_state")
    },
}


@rows(REFUSED)
def test_refused_by_name(row: Refusal, tmp_path: Path) -> None:
    refused(row, tmp_path)


def test_a_prepared_optimizer_is_refused_and_stays_open() -> None:
    accelerator, model = ours(), layers()
    optimizer = penstock.prepare(model, adam(model), precision="fp32")
    with pytest.raises(ConfigError, match=r"what penstock.prepare.. returned"):
        accelerator.prepare(model, optimizer)
    optimizer.close()


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
