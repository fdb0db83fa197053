"""Exports are what transformers loads, and compute what the trained model computed."""

import json
import os
import subprocess
import sys
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
from tests.lib.memory import disks
from tests.support import run_ranks, thorough

transformers = pytest.importorskip("transformers")

IDS = torch.arange(24).reshape(2, 12) % 97
NARROW: dict[str, Any] = {"vocab_size": 97, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}


def llama(tied: bool = False) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        **NARROW,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, n_positions=32, vocab_size=97, bos_token_id=1, eos_token_id=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        **NARROW,
    )
    return transformers.MixtralForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama tied": lambda: llama(tied=True),
    "gpt2": gpt2,
    "mixtral": mixtral,
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
    torch.manual_seed(0)
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
    torch.manual_seed(0)
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


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_values_are_those_of_the_master(precision: Any, dtype: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
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


@pytest.mark.parametrize("most_bytes", [1, 20_000, 10**9])
def test_files_are_divided_and_indexed(most_bytes: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = llama()
    expected = saved(model, tmp_path / "step", precision="fp32")
    penstock.export(tmp_path / "step", tmp_path / "out", dtype="fp32", max_shard_bytes=most_bytes)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    count = {1: len(list(model.parameters())), 10**9: 1}.get(most_bytes, len(files))
    assert len(files) == count
    if count > 1:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == files
        assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
        assert files[0] == f"model-00001-of-{count:05d}.safetensors"
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert file.stat().st_size <= max(most_bytes, 97 * 32 * 4) + 4096
    loaded = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(logits(loaded), expected)


def test_state_on_every_tier(tmp_path: Path) -> None:
    torch.manual_seed(0)
    placement = penstock.Placement(params="nvme", optimizer={"device": 0.3, "cpu": 0.3, "nvme": 0.4}, nvme_path=disks())
    expected = saved(llama(), tmp_path / "step", precision="fp32", placement=placement)
    penstock.export(tmp_path / "step", tmp_path / "out", dtype="fp32")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
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
    torch.manual_seed(0)
    model = llama()
    for index, block in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(block, backend="eager")
    optimizer = trained(model, steps=0)
    optimizer.save(tmp_path / "step")
    penstock.export(tmp_path / "step", tmp_path / "out")
    assert read(tmp_path / "out").keys() == dict(llama().named_parameters()).keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"


def test_a_compiled_model_is_described_as_what_it_was(tmp_path: Path) -> None:
    model = torch.compile(llama(), backend="eager")
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()))
    optimizer.save(tmp_path / "step")
    penstock.export(tmp_path / "step", tmp_path / "out")
    assert read(tmp_path / "out").keys() == dict(llama().named_parameters()).keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


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
    base = llama(tied=True)
    before = logits(base)
    expected = saved(with_adapters(base), tmp_path / "step", precision="fp32")
    penstock.export(tmp_path / "step", tmp_path / "out", dtype="fp32", adapters_only=False)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(again, transformers.LlamaForCausalLM)
    assert torch.equal(logits(again), before)
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "out" / "adapter")
    assert torch.equal(logits(loaded), expected)


def test_what_was_trained_beside_adapters_is_not_lost(tmp_path: Path) -> None:
    model = with_adapters(llama())
    model.get_base_model().model.norm.weight.requires_grad_(True)
    saved(model, tmp_path / "step", steps=0)
    with pytest.raises(
        penstock.CheckpointError, match=r"norm\.weight' was trained and is of no adapter.*adapters_only=F"
    ):
        penstock.export(tmp_path / "step", tmp_path / "out")


# Refusals: nothing appears


def damage(folder: Path, storage: str) -> None:
    """Flip a bit of the first tile's values of a home."""
    from penstock.checkpoint.reader import Checkpoint

    key = next(Checkpoint.open(folder).tiles())
    record = next(record for record in key.unit.records(key.number) if record.storage.name == storage)
    data = bytearray(key.file.read_bytes())
    data[record.offset + 5] ^= 1
    key.file.write_bytes(data)


def test_a_damaged_tile_leaves_nothing(tmp_path: Path) -> None:
    saved(llama(), tmp_path / "step")
    damage(tmp_path / "step", "param")
    with pytest.raises(penstock.CheckpointError, match="damaged"):
        penstock.export(tmp_path / "step", tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]


def test_optimizer_states_are_not_read(tmp_path: Path) -> None:
    saved(llama(), tmp_path / "step")
    damage(tmp_path / "step", "optimizer")
    penstock.export(tmp_path / "step", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_values_too_large_for_fp16(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, 1e5)
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()))
    optimizer.save(tmp_path / "step")
    with pytest.raises(penstock.CheckpointError, match=r"'parameters\.weight' has values that are too large for fp16"):
        penstock.export(tmp_path / "step", tmp_path / "out", dtype="fp16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.uint16])
def test_buffers_that_no_export_has_are_named(dtype: torch.dtype, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("odd", torch.ones(3, dtype=dtype))
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()))
    optimizer.save(tmp_path / "step")
    optimizer.close()
    with pytest.raises(penstock.CheckpointError, match=r"'buffers\.odd' is "):
        penstock.export(tmp_path / "step", tmp_path / "out")
    assert not (tmp_path / "out").exists()


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


@pytest.mark.parametrize(
    ("arguments", "match"), [({"dtype": "int8"}, "dtype='int8'"), ({"max_shard_bytes": 0}, "max_shard_bytes=0")]
)
def test_arguments_that_cannot_be(arguments: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(penstock.ConfigError, match=match):
        penstock.export(tmp_path, tmp_path / "out", **arguments)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(llama(), tmp_path / "step", steps=0)
    real, calls = os.pwrite, []

    def pwrite(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) > 5:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(penstock.CheckpointError, match=r"model\.safetensors failed: No space left.*Free space there"):
        penstock.export(tmp_path / "step", tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = llama()
    expected = saved(model, tmp_path / "step", precision="fp32")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: real(descriptor, data[:1000], offset))
    penstock.export(tmp_path / "step", tmp_path / "out", dtype="fp32")
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "out")), expected)


KILLED = """
import os, sys, penstock
real, calls = os.pwrite, []
def pwrite(*arguments):
    calls.append(1)
    if len(calls) > 5:
        os.kill(os.getpid(), 9)
    return real(*arguments)
os.pwrite = pwrite
penstock.export(sys.argv[1], sys.argv[2])
"""


def test_what_a_killed_export_has_left_is_replaced(tmp_path: Path) -> None:
    saved(llama(), tmp_path / "step", steps=0)
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "step", tmp_path / "out"], check=False, timeout=120)
    assert done.returncode == -9
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


def test_two_exports_to_one_folder(tmp_path: Path) -> None:
    saved(llama(), tmp_path / "step", steps=0)
    with (
        module._hidden(tmp_path / "out", [""]),
        pytest.raises(penstock.CheckpointError, match=r"Another export to .* is running"),
    ):
        penstock.export(tmp_path / "step", tmp_path / "out")


# Memory

MEASURED = """
import resource, sys, penstock, torch
import penstock.ext.export, safetensors.torch
torch.set_num_threads(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
penstock.export(sys.argv[1], sys.argv[2], dtype=sys.argv[3])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize("dtype", [thorough("fp32"), "bf16"])
def test_memory_does_not_grow_with_the_model(dtype: str, tmp_path: Path) -> None:
    """One tensor of 128 MiB in fp32; tiles of 1 MiB of parameters."""
    model = nn.Sequential(nn.Linear(4096, 8192, bias=False))
    optimizer = penstock.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        placement=penstock.Placement(params="cpu", optimizer="cpu"),
        options=penstock.Options(tile_bytes=1 << 20),
    )
    optimizer.save(tmp_path / "step")
    optimizer.close()
    command = [sys.executable, "-c", MEASURED, tmp_path / "step", tmp_path / "out", dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 40 << 20


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
    torch.manual_seed(0)
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
        try:
            penstock.export(checkpoint, out, max_shard_bytes=20_000)
        except penstock.CheckpointError as error:
            return str(error)
    return ""


def test_a_rank_that_fails_stops_all(tmp_path: Path) -> None:
    saved(llama(), tmp_path / "step", steps=0)
    said = run_ranks(export_with_a_full_disk_on_one, 2, str(tmp_path / "step"), str(tmp_path / "out"))
    assert "No space left" in said[1]
    assert said[0].startswith("Rank 1 of 2 failed")
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]


def test_the_average_is_exported(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = llama()
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
    with pytest.raises(penstock.CheckpointError, match=r"has no 'ema': 'ema.half' there"):
        penstock.export(tmp_path / "a", tmp_path / "other", average=True)
    assert not (tmp_path / "other").exists()
