"""The final model is written while it is gathered: the same files as transformers writes of a model in memory."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import penstock
from penstock.checkpoint import tensorfiles
from penstock.errors import CheckpointError
from penstock.integrations import saving, weights
from penstock.integrations.saving import save_pretrained, written_entries
from penstock.integrations.weights import state_entries
from tests.lib import models
from tests.unit.integrations.families_rows import build

transformers = pytest.importorskip("transformers")


def llama(*, tied: bool = False) -> Any:
    return models.llama(width=16, vocab_size=64, tie_word_embeddings=tied)


def prepared(model: Any, **how: Any) -> penstock.Optimizer:
    return penstock.prepare(model, torch.optim.AdamW(model.parameters()), **{"precision": "fp32", **how})


def gpt2() -> Any:
    return models.seeded(lambda: build("GPT2LMHeadModel"))


def mixtral() -> Any:
    """Its experts are fused in memory, and files have each of them."""
    return models.seeded(lambda: build("MixtralForCausalLM"))


def contents(folder: Path) -> dict[str, Any]:
    """Every file of a folder: tensors, or text."""
    return {
        file.name: load_file(file) if file.suffix == ".safetensors" else file.read_text() for file in folder.iterdir()
    }


@pytest.mark.parametrize(
    ("make", "streams", "precision"),
    [(llama, True, "fp32"), (lambda: llama(tied=True), True, "bf16"), (gpt2, True, "fp32"), (mixtral, False, "bf16")],
    ids=["llama", "tied", "gpt2", "fused"],
)
def test_the_files_are_those_of_transformers(
    make: Callable[[], Any],
    streams: bool,
    precision: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model, plain = make(), make().to({"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    optimizer = prepared(model, precision=precision, placement=penstock.Placement(params="cpu"))
    ids = torch.arange(16)[None]
    optimizer.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    with torch.no_grad():
        for weight, trained in zip(plain.parameters(), model.parameters(), strict=True):
            weight.copy_(optimizer.full_param(trained))
    plain.save_pretrained(tmp_path / "plain")
    collected = []
    monkeypatch.setattr(
        saving, "gather_entries", lambda *a, **k: collected.append(1) or weights.gather_entries(*a, **k)
    )
    monkeypatch.setattr(weights, "GATHER_BYTES", 5000)
    assert (written_entries(model, state_entries(model)) is not None) == streams
    capfd.readouterr()
    save_pretrained(model, optimizer, tmp_path / "ours")
    optimizer.close()
    assert bool(collected) is not streams
    assert capfd.readouterr().err == ""  # no bar
    wanted, found = contents(tmp_path / "plain"), contents(tmp_path / "ours")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, str):
            assert found[name] == value, name
        else:
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    _, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report


def test_no_more_is_in_memory_than_is_gathered_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    optimizer = prepared(model)
    monkeypatch.setattr(weights, "GATHER_BYTES", 3000)
    values: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []
    write = tensorfiles.TensorFile.write

    def seen(self: Any, name: str, start: int, value: torch.Tensor) -> None:
        values.append(weakref.ref(value))
        held.append(sum(alive.nbytes for ref in values if (alive := ref()) is not None))
        write(self, name, start, value)

    gathered: list[list[torch.Tensor]] = []
    gather = optimizer.gathered
    monkeypatch.setattr(optimizer, "gathered", lambda group: gathered.append(group) or gather(group))
    monkeypatch.setattr(tensorfiles.TensorFile, "write", seen)
    save_pretrained(model, optimizer, tmp_path)
    optimizer.close()
    assert sum(len(group) for group in gathered) == len(held) == len(list(model.parameters()))
    assert all(len(group) == 1 or sum(p.nbytes for p in group) <= 3000 for group in gathered)
    largest = max(p.nbytes for p in model.parameters())
    assert max(held) <= 2 * max(3000, largest) < sum(p.nbytes for p in model.parameters())


def test_a_write_that_fails_leaves_the_model_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    optimizer = prepared(model)
    save_pretrained(model, optimizer, tmp_path)
    before = contents(tmp_path)
    write = tensorfiles.TensorFile.write
    gathered: list[list[torch.Tensor]] = []
    gather = optimizer.gathered

    def fails(self: Any, name: str, start: int, values: torch.Tensor) -> None:
        if "layers.1" in name:
            raise CheckpointError("the disk is full")
        write(self, name, start, values)

    monkeypatch.setattr(tensorfiles.TensorFile, "write", fails)
    monkeypatch.setattr(weights, "GATHER_BYTES", 3000)
    monkeypatch.setattr(optimizer, "gathered", lambda group: gathered.append(group) or gather(group))
    with pytest.raises(CheckpointError, match="the disk is full"):
        save_pretrained(model, optimizer, tmp_path)
    optimizer.close()
    assert sum(len(group) for group in gathered) == len(list(model.parameters())), "others wait for this rank"
    after = contents(tmp_path)
    assert after.keys() == before.keys()
    torch.testing.assert_close(after["model.safetensors"], before["model.safetensors"], rtol=0, atol=0)


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text("before")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".model.partial").symlink_to(tmp_path / "theirs")
    (tmp_path / "out" / "config.json").symlink_to(tmp_path / "theirs" / "config.json")
    model = llama()
    optimizer = prepared(model)
    with pytest.raises(CheckpointError, match=r"Writing .*out failed"):
        save_pretrained(model, optimizer, tmp_path / "out")
    (tmp_path / "out" / ".model.partial").unlink()
    (tmp_path / "out" / ".model.partial").mkdir()  # as a run that was killed leaves it
    (tmp_path / "out" / ".model.partial" / "model.safetensors").write_text("a part")
    save_pretrained(model, optimizer, tmp_path / "out")
    optimizer.close()
    left = {file.name for file in (tmp_path / "out").iterdir()}
    assert left == {"config.json", "generation_config.json", "model.safetensors"}
    assert not (tmp_path / "out" / "config.json").is_symlink()
    assert [file.name for file in (tmp_path / "theirs").iterdir()] == ["config.json"]
    assert (tmp_path / "theirs" / "config.json").read_text() == "before"
