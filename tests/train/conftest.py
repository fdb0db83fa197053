"""Black-box tests of `penstock train`: a tiny model, rows of every kind, and the libraries that the command stands on.

They run in `make test` in the pinned releases, and by their marker in `make test-integrations` in both.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.instruct import MARKED, PLAIN, byte_tokenizer, conversations, instruct_folder
from tests.lib.ranks import PRELOADED
from tests.lib.releases import leave_out

HERE = Path(__file__).parent
OWN = "tests.train.preloaded"
#: Files that say of Penstock alone what it does: they are run in the pinned releases, and not in those before.
ONCE = ("outcome", "page", "refusals", "resume", "signals", "torchrun")
COUNT = 15  # rows of an epoch, which ends in the middle of a step
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}


def pytest_ignore_collect() -> bool | None:
    """Leave the files alone on a machine without the libraries."""
    return None if all(find_spec(name) for name in ("trl", "datasets", "peft", "yaml")) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.train)
            if OWN not in PRELOADED:
                PRELOADED.append(OWN)
    leave_out(config, items, HERE, [f"test_{name}.py" for name in ONCE])


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `datasets` keeps what TRL reads."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    """No network, no word to TRL's makers, no cache of the user's; and the working folder is the test's."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CI", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    monkeypatch.chdir(tmp_path)


def chats() -> list[dict[str, Any]]:
    return conversations(COUNT)


def completions() -> list[dict[str, Any]]:
    """A prompt and a completion in plain text, both of different lengths."""
    numbers = range(COUNT)
    return [{"prompt": f"{n} and {n}{' ' * (n % 4)} is", "completion": f" {2 * n}{'!' * (n % 5)}"} for n in numbers]


def chat_completions() -> list[dict[str, Any]]:
    return [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in chats()]


def texts() -> list[dict[str, Any]]:
    return [{"text": f"{n} sheep and {n * n * n} goats{'.' * (n % 6)}"} for n in range(COUNT)]


ROWS = {"chats": chats, "completions": completions, "chat completions": chat_completions, "texts": texts}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models in `marked` and `plain`, which differ in their chat template, `tied`, `grows` and `gpt2`; rows by kind.

    A folder has `train.jsonl` and `test.jsonl`, as `datasets.load_dataset` reads it.
    """
    folder = tmp_path_factory.mktemp("train")
    instruct_folder(folder / "marked", template=MARKED, **SIZES)
    instruct_folder(folder / "plain", template=PLAIN, **SIZES)
    instruct_folder(folder / "tied", template=MARKED, **SIZES, tie_word_embeddings=True)
    instruct_folder(folder / "grows", template=MARKED, **SIZES, vocab_size=258)  # the tokenizer has a token more
    save_gpt2(folder / "gpt2")
    for name, rows in ROWS.items():
        (folder / name).mkdir()
        for split, some in (("train", rows()), ("test", rows()[::3])):
            lines = [json.dumps(row) + "\n" for row in some]
            (folder / name / f"{split}.jsonl").write_text("".join(lines))
    return folder


def save_gpt2(folder: Path) -> None:
    """Save a GPT-2 without dropout, with the tokenizer and chat template of the others."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=259, bos_token_id=256, eos_token_id=258, **sizes, **rates)
    GPT2LMHeadModel(config).save_pretrained(folder)
    byte_tokenizer(MARKED).save_pretrained(folder)
