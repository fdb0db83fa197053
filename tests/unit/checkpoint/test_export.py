"""Exports are what transformers loads, and compute what the trained model computed."""

import json
import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import penstock
from penstock.ext import export as module
from penstock.rules import split_master
from tests.lib.models import WORDS, llama, seeded
from tests.lib.ranks import run_ranks
from tests.lib.refusals import Refusal, refused, rows, said_by
from tests.models.transformers_rows import gpt2, mixtral

transformers = pytest.importorskip("transformers")

IDS = torch.arange(24).reshape(2, 12) % WORDS


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "gpt2": lambda: seeded(gpt2),
    "mixtral": lambda: seeded(mixtral),
}


def trained(model: nn.Module, steps: int = 2, **rest: Any) -> penstock.Optimizer:
    """A few steps, so that nothing is what it was built with."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    prepared = penstock.prepare(model, optimizer, options=penstock.Options(tile_bytes=4096), **rest)
    for _ in range(steps):
        prepared.backward(model(input_ids=IDS, labels=IDS).loss)
        prepared.step()
        prepared.zero_grad()
    return prepared


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model.eval()(input_ids=IDS).logits


def saved(model: nn.Module, folder: Path, **rest: Any) -> Tensor:
    """Train, save, and what the model computes then."""
    optimizer = trained(model, **rest)
    optimizer.save(folder)
    found = logits(model)
    optimizer.close()
    return found


def read(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_what_was_trained(name: str, tmp_path: Path) -> None:
    """In the dtype of training the loaded model computes the same bits."""
    model = MODELS[name]()
    expected = saved(model, tmp_path / "step", precision="fp32")
    penstock.export(tmp_path / "step", tmp_path / "out", dtype="fp32")
    loaded, report = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.dtype == torch.float32
    assert torch.equal(logits(loaded), expected)


@pytest.mark.parametrize("master", ["remainder", "fp32", "none"])
def test_bf16_is_what_the_model_computed_with(master: str, tmp_path: Path) -> None:
    expected = saved(llama(), tmp_path / "step", precision="bf16", master=master)
    penstock.export(tmp_path / "step", tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits(loaded), expected)


def test_ties_are_as_the_model_computed_with_them(tmp_path: Path) -> None:
    """Halfway between two bf16 values, remainders round away from zero, and a cast to the even one."""
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, 1 + 2**-8)
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()))
    optimizer.save(tmp_path / "step")
    with optimizer.gathered():
        computed = model.weight.detach().clone()
    penstock.export(tmp_path / "step", tmp_path / "out")
    assert torch.equal(read(tmp_path / "out")["weight"], computed)
    assert computed[0, 0] == 1 + 2**-7


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "fp32"), ("fp16", "bf16"), ("bf16", "fp16")])
def test_values_are_those_of_the_master(precision: Any, dtype: Any, tmp_path: Path) -> None:
    model = llama()
    optimizer = trained(model, precision=precision)
    masters = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
    optimizer.save(tmp_path / "step")
    penstock.export(tmp_path, tmp_path / "out", dtype=dtype)
    found = read(tmp_path / "out")
    assert found.keys() == masters.keys()
    for name, value in found.items():
        master = masters[name]  # ties of a bf16 parameter are rounded away from zero
        expected = {"fp32": master, "bf16": split_master(master)[0], "fp16": master.half()}[dtype]
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected), name


@pytest.mark.parametrize("most_bytes", [1, 20_000])
def test_files_are_divided_and_indexed(most_bytes: int, tmp_path: Path) -> None:
    model = llama()
    expected = saved(model, tmp_path / "step", precision="fp32")
    penstock.export(tmp_path / "step", tmp_path / "out", dtype="fp32", max_shard_bytes=most_bytes)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert most_bytes > 1 or len(files) == len(list(model.parameters()))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert file.stat().st_size <= max(most_bytes, WORDS * 32 * 4) + 8192
    loaded = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(logits(loaded), expected)


class Mixed(nn.Module):
    """Buffers of several dtypes, a scalar, an empty one, one that is not state, and frozen whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.codes = nn.Parameter(torch.arange(11), requires_grad=False)
        self.eighths = nn.Parameter(torch.randn(3, 5).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * self.scale


def test_buffers_and_other_dtypes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Mixed()
    optimizer = penstock.prepare(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    optimizer.backward(model(torch.randn(8, 7)).square().mean())
    optimizer.step()
    optimizer.save(tmp_path / "step")
    optimizer.close()
    penstock.export(tmp_path / "step", tmp_path / "out", dtype="bf16")
    found, expected = read(tmp_path / "out"), model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        is_parameter = name in dict(model.named_parameters())
        converts = is_parameter and value.is_floating_point() and value.dtype != torch.float8_e4m3fn
        wanted = value.to(torch.bfloat16) if converts else value
        assert found[name].dtype == wanted.dtype, name
        assert torch.equal(found[name].float(), wanted.float()), name
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["model.safetensors"]


def test_compiled_models_have_their_own_names(tmp_path: Path) -> None:
    model = llama()
    for index, block in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(block, backend="eager")
    optimizer = trained(torch.compile(model, backend="eager"), steps=0)
    optimizer.save(tmp_path / "step")
    penstock.export(tmp_path / "step", tmp_path / "out")
    assert read(tmp_path / "out").keys() == dict(llama().named_parameters()).keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"


# Adapters


def with_adapters(model: nn.Module, **rest: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **rest)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize(
    "rest", [{}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}], ids=["lora", "head", "dora"]
)
def test_peft_loads_the_adapters_that_were_trained(rest: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = llama()
    base.save_pretrained(tmp_path / "base")
    expected = saved(with_adapters(base, **rest), tmp_path / "step", precision="fp32")
    penstock.export(tmp_path / "step", tmp_path / "out", dtype="fp32")
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert not torch.equal(logits(again), expected)
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "out")
    assert torch.equal(logits(loaded), expected)


def test_the_model_below_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = llama(tie_word_embeddings=True)
    before = logits(base)
    expected = saved(with_adapters(base), tmp_path / "step", precision="fp32")
    penstock.export(tmp_path / "step", tmp_path / "out", dtype="fp32", adapters_only=False)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(again, transformers.LlamaForCausalLM)
    assert torch.equal(logits(again), before)
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "out" / "adapter")
    assert torch.equal(logits(loaded), expected)


# Refusals: nothing appears


def damage(folder: Path) -> None:
    """Flip a bit of the first tile's parameters."""
    from penstock.checkpoint.reader import Checkpoint

    key = next(Checkpoint.open(folder).tiles())
    record = next(record for record in key.unit.records(key.number) if record.storage.name == "param")
    data = bytearray(key.file.read_bytes())
    data[record.offset + 5] ^= 1
    key.file.write_bytes(data)


def of_linear(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Save a small model on which something was done before."""

    def save(folder: Path) -> None:
        model = nn.Linear(4, 4)
        change(model)
        penstock.prepare(model, torch.optim.AdamW(model.parameters())).save(folder)

    return save


def a_damaged_tile(folder: Path) -> None:
    of_linear(lambda m: None)(folder)
    damage(folder)


def trained_beside_adapters(folder: Path) -> None:
    model = with_adapters(llama())
    model.get_base_model().model.norm.weight.requires_grad_(True)
    saved(model, folder, steps=0)


def odd(dtype: torch.dtype) -> Callable[[Path], None]:
    return of_linear(lambda m: m.register_buffer("odd", torch.ones(3, dtype=dtype)))


CheckpointError, ConfigError = penstock.CheckpointError, penstock.ConfigError
#: What is saved; what `export` is asked for is `how`.
REFUSED = {
    "a damaged tile": Refusal(a_damaged_tile, "damaged", CheckpointError),
    "what was trained beside adapters": Refusal(
        trained_beside_adapters, "norm.weight' was trained and is of no adapter", CheckpointError
    ),
    "values too large for fp16": Refusal(
        of_linear(lambda m: nn.init.constant_(m.weight, 1e5)),
        "'parameters.weight' has values that are too large for fp16",
        CheckpointError,
        {"dtype": "fp16"},
    ),
    "complex64": Refusal(odd(torch.complex64), "'buffers.odd' is ", CheckpointError),
    "complex128": Refusal(odd(torch.complex128), "'buffers.odd' is ", CheckpointError),
    "uint16": Refusal(odd(torch.uint16), "'buffers.odd' is ", CheckpointError),
    "no dtype": Refusal(of_linear(lambda m: None), "dtype='int8'", ConfigError, {"dtype": "int8"}),
    "no size": Refusal(of_linear(lambda m: None), "max_shard_bytes=0", ConfigError, {"max_shard_bytes": 0}),
    "no average": Refusal(of_linear(lambda m: None), "has no 'ema'", CheckpointError, {"average": True}),
}


@rows(REFUSED)
def test_what_cannot_be_exported_leaves_nothing(row: Refusal, tmp_path: Path) -> None:
    row.do(tmp_path / "step")
    export = Refusal(lambda: penstock.export(tmp_path / "step", tmp_path / "out", **row.how or {}), row.text, row.error)
    refused(export)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]


def test_what_is_there_stays(tmp_path: Path) -> None:
    saved(llama(), tmp_path / "step", steps=0)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(penstock.ConfigError, match="is there already"):
        penstock.export(tmp_path / "step", tmp_path / "out")
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["mine"]
    (tmp_path / "out" / "mine").unlink()
    penstock.export(tmp_path / "step", tmp_path / "out")  # into the empty folder
    assert (tmp_path / "out" / "model.safetensors").exists()


def killed(rank: int, checkpoint: Path, out: Path) -> None:
    real, calls = os.pwrite, []

    def pwrite(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) > 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    os.pwrite = pwrite
    penstock.export(checkpoint, out)


def test_what_a_killed_export_has_left_is_replaced(tmp_path: Path) -> None:
    saved(llama(), tmp_path / "step", steps=0)
    with pytest.raises(AssertionError, match="rank 0 died with exit code -9"):
        run_ranks(killed, 1, tmp_path / "step", tmp_path / "out", fresh=True)
    assert (tmp_path / ".out.export" / "model.safetensors").exists()
    assert not (tmp_path / "out").exists()
    penstock.export(tmp_path / "step", tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "step"]


@pytest.mark.parametrize("is_link", [True, False], ids=["link", "folder"])
def test_what_somebody_has_beside_an_export_is_not_touched(is_link: bool, tmp_path: Path) -> None:
    saved(llama(), tmp_path / "step", steps=0)
    theirs = tmp_path / ("theirs" if is_link else ".out.export")
    (theirs / "deep").mkdir(parents=True)
    (theirs / "deep" / "mine").write_text("x")
    if is_link:
        (tmp_path / ".out.export").symlink_to(theirs)
    with pytest.raises(penstock.CheckpointError, match=r"\.out\.export is there, and no export has left it"):
        penstock.export(tmp_path / "step", tmp_path / "out")
    assert [entry.name for entry in theirs.iterdir()] == ["deep"]
    assert (theirs / "deep" / "mine").read_text() == "x"
    assert (tmp_path / ".out.export").is_symlink() == is_link
    assert not (tmp_path / "out").exists()


# Memory


def growth_of(rank: int, checkpoint: Path, out: Path) -> int:
    """Bytes by which an export makes a new process larger than it ever was."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    penstock.export(checkpoint, out, dtype="bf16")
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """One tensor of 64 MiB in fp32; tiles of 1 MiB of parameters."""
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False))
    optimizer = penstock.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        placement=penstock.Placement(params="cpu", optimizer="cpu"),
        options=penstock.Options(tile_bytes=1 << 20),
    )
    optimizer.save(tmp_path / "step")
    optimizer.close()
    (grown,) = run_ranks(growth_of, 1, tmp_path / "step", tmp_path / "out", fresh=True)
    assert grown < 24 << 20


# Ranks


def export_on(rank: int, checkpoint: str, out: str) -> list[str]:
    written: list[str] = []
    real = module.TensorFile

    def noted(path: Path, *rest: Any) -> Any:
        written.append(path.name)
        return real(path, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TensorFile", noted)
        penstock.export(checkpoint, out, dtype="fp32", max_shard_bytes=20_000)
    return written


def save_on(rank: int, folder: str) -> Tensor | None:
    model = llama()
    optimizer = trained(model, precision="fp32")
    optimizer.save(folder)
    found = logits(model)
    optimizer.close(keep_params=False)
    return found


def test_ranks_divide_the_files(tmp_path: Path) -> None:
    expected = run_ranks(save_on, 2, str(tmp_path / "step"))[0]
    written = run_ranks(export_on, 2, str(tmp_path / "step"), str(tmp_path / "out"))
    assert not set(written[0]) & set(written[1])
    assert abs(len(written[0]) - len(written[1])) <= 1
    assert sorted(written[0] + written[1]) == sorted(f.name for f in (tmp_path / "out").glob("*.safetensors"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), expected)


def export_with_a_full_disk_on_one(rank: int, checkpoint: str, out: str) -> str:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(os, "pwrite", full)
        return said_by(lambda: penstock.export(checkpoint, out, max_shard_bytes=20_000))


def test_a_rank_that_fails_stops_all(tmp_path: Path) -> None:
    saved(llama(), tmp_path / "step", steps=0)
    said = run_ranks(export_with_a_full_disk_on_one, 2, str(tmp_path / "step"), str(tmp_path / "out"))
    assert re.search(r"model-\d+-of-\d+\.safetensors failed: No space left.*Free space there", said[1])
    assert said[0].startswith("CheckpointError: Rank 1 of 2 failed")
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]


def test_the_average_is_exported(tmp_path: Path) -> None:
    model = llama(seed=3)
    model.model.embed_tokens.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = penstock.prepare(model, torch.optim.AdamW(trained, lr=1e-2))
    ema = penstock.EMA(optimizer, 0.5, name="half")
    for _ in range(2):
        optimizer.backward(model(input_ids=IDS, labels=IDS).loss)
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    optimizer.save(tmp_path / "a")
    with ema.applied():
        wanted = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
    optimizer.close()
    penstock.export(tmp_path / "a", tmp_path / "out", dtype="fp32", average="half")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
