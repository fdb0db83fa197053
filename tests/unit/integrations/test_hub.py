"""Models by a hub's names: from its cache on this machine, and as one line where there is none."""

import re
from pathlib import Path

import huggingface_hub
import pytest

from penstock.errors import ConfigError
from penstock.integrations.hub import fetch_model, is_hub_name
from penstock.integrations.huggingface import find_model
from tests.lib.models import llama

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's, on a machine without a network."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return folder


def test_names() -> None:
    for name in ("owner/name", "Owner-1/Llama_3.1-8B", "owner/name@main", "owner/name@refs/pr/1"):
        assert is_hub_name(name), name
    paths = ("owner", "owner/name/more", "/owner/name", "./owner", "../owner", "~/owner", "owner/")
    for name in (*paths, "owner/na me", "owner/" + "x" * 97, "\u00f6wner/name"):
        assert not is_hub_name(name), name


def test_a_path_that_is_misspelt_is_not_looked_up_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert not is_hub_name("runs/frist")
    with pytest.raises(
        ConfigError, match=r"^--model 'runs/frist' is neither a folder, a preset nor owner/name of a hub"
    ):
        find_model("runs/frist", seq_length=8)


def test_a_model_in_the_cache_is_found_without_a_network(cache: Path) -> None:
    repository = cache / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    llama(1, vocab_size=257).save_pretrained(repository / "snapshots" / COMMIT)
    source = find_model("owner/name", seq_length=16)
    assert source.folder == repository / "snapshots" / COMMIT
    assert source.vocab_size == 257
    assert find_model(f"owner/name@{COMMIT}", seq_length=16).folder == source.folder


def test_a_model_that_is_not_there_is_one_line(cache: Path) -> None:
    message = "--model 'owner/name' is no folder here, and the hub did not give it: "
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}") as caught:
        find_model("owner/name", seq_length=16)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("Name a folder, or check the name, the network and HF_TOKEN.")


def test_pickles_and_code_are_not_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[dict[str, object]] = []

    def snapshot_download(repository: str, **how: object) -> str:
        asked.append({"repository": repository, **how})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    fetch_model("owner/name@v1")
    fetch_model("owner/name", code=True)
    without, with_code = asked
    assert (without["repository"], without["revision"], with_code["revision"]) == ("owner/name", "v1", None)
    assert "*.py" not in without["allow_patterns"]  # type: ignore[operator]
    assert "*.py" in with_code["allow_patterns"]  # type: ignore[operator]
    assert not {"*.bin", "*.pt", "*"} & set(with_code["allow_patterns"])  # type: ignore[call-overload]
