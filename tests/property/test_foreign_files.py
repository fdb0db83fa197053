"""Files of other libraries that somebody else may have written: read as they were, or refused in one line.

Model folders, DeepSpeed's checkpoints, and what a checkpoint says of the run that `--resume` goes on with. Nothing else
is raised, no more memory is taken than small files need, and no code runs. Every run draws the same examples;
`make fuzz` draws others, and more.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.ext.interop.deepspeed import import_checkpoint
from penstock.integrations.huggingface import build_empty, build_model, find_model
from penstock.integrations.vocabulary import rows_for
from tests.deepspeed_checks import load
from tests.instruct import byte_tokenizer
from tests.lib.fuzz import examples
from tests.property.test_checkpoint_files import at, change_bytes, change_values, copy_of, limited_memory

DEEPSPEED = Path(__file__).parents[1] / "data" / "deepspeed"


def refused_in_one_line(work: Callable[[], object]) -> None:
    said = "nothing"
    with limited_memory():
        try:
            work()
        except penstock.PenstockError as error:
            said = str(error)
    assert said
    assert "\n" not in said
    assert len(said) < 3000


# Model folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A whole model folder, and one that is changed."""
    from transformers import LlamaConfig, LlamaForCausalLM, logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    whole = tmp_path_factory.mktemp("model") / "whole"
    LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=32, **sizes)).save_pretrained(whole)
    byte_tokenizer(None).save_pretrained(whole)
    return whole, whole.with_name("changed")


def use(folder: Path) -> None:
    """What a run does with a folder until it trains."""
    source = find_model(str(folder), seq_length=8)
    rows_for(source.folder, source.vocab_size)
    empty = build_empty(source)
    model = build_model(source) if empty is None else empty
    weights = None if empty is None else source.folder
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32", weights=weights)
    optimizer.close(keep_params=False)


FILES = ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"]
#: What those files have besides that another library may look at.
KEYS = ["quantization_config", "auto_map", "dtype", "text_config", "architectures", "pad_token_id", "tokenizer_class"]
KEYS += ["torch_dtype", "model_type", "chat_template", "added_tokens_decoder", "extra_special_tokens", "max_length"]
VALUES: list[Any] = ["gpt2", "mistral", "bloom", "llama", "LlamaForCausalLM", "bitsandbytes", {"quant_method": "awq"}]
VALUES += [{"rope_type": "yarn"}, {"rope_type": "dynamic", "factor": 0}, {"model_type": "mixtral"}, "float8_e4m3fn"]


@examples(40)
@given(data=st.data())
def test_model_folders_of_anybody(folders: tuple[Path, Path], data: st.DataObject) -> None:
    whole, folder = folders
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    file = folder / data.draw(st.sampled_from(FILES))
    # A model may be as large as its configuration says: other numbers there would be believed.
    changes = (
        ["bytes", "gone"] if file.name == "config.json" else ["values", "values", "values", "keys", "bytes", "gone"]
    )
    how = data.draw(st.sampled_from(changes))
    if how == "gone":
        file.unlink()
    elif how == "bytes":
        change_bytes(file, data)
    elif file.suffix == ".safetensors":
        change_header(file, data)
    else:
        content = json.loads(file.read_bytes())
        if how == "keys":
            content[data.draw(st.sampled_from(KEYS))] = copy_of(data.draw(st.sampled_from(VALUES)))
        change_values(content, data)
        file.write_text(json.dumps(content))
    refused_in_one_line(lambda: use(folder))


def change_header(file: Path, data: st.DataObject) -> None:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change_values(header, data)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("config.json", {"vocab_size": -1}, "vocab_size of -1"),
    ("config.json", {"vocab_size": "many"}, "many"),
    ("config.json", {"vocab_size": 1 << 40}, "cannot be read"),
    ("config.json", {"hidden_act": "nope"}, "nope"),
    ("config.json", {"model_type": "nope"}, "nope"),
    ("config.json", {"model_type": []}, "cannot be read"),
    ("config.json", {"text_config": {"vocab_size": []}}, ""),
    ("config.json", {"text_config": 7}, "cannot be read"),
    ("tokenizer_config.json", {"model_max_length": -(10**400)}, ""),
]


@pytest.mark.parametrize(("name", "values", "said"), WRONG, ids=lambda value: str(value)[:40])
def test_a_folder_whose_values_make_no_model(
    folders: tuple[Path, Path], tmp_path: Path, name: str, values: dict[str, Any], said: str
) -> None:
    folder = Path(shutil.copytree(folders[0], tmp_path / "model"))
    content = json.loads((folder / name).read_bytes()) | values
    (folder / name).write_text(json.dumps(content))
    if not said:
        return refused_in_one_line(lambda: use(folder))
    with limited_memory(), pytest.raises(penstock.ConfigError, match=said):
        use(folder)
    return None


#: What stands where a file was.
STANDS: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "dangling": lambda file: file.symlink_to("nowhere"),
    "deep": lambda file: file.write_bytes(b'{"a":' * 100_000),
    "number": lambda file: file.write_bytes(b"7"),
    "empty": lambda file: file.write_bytes(b""),
}
ENDLESS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "endless": lambda file: file.symlink_to("/dev/zero"),
    "large": lambda file: (file.touch(), os.truncate(file, 2 << 30)),
}
OTHERS = [*FILES[1:], "model.safetensors.index.json", "special_tokens_map.json"]


@pytest.mark.parametrize(("name", "kind"), [*product(FILES[:1], STANDS | ENDLESS), *product(OTHERS, STANDS)])
def test_a_folder_of_things_that_are_no_files(folders: tuple[Path, Path], tmp_path: Path, name: str, kind: str) -> None:
    folder = Path(shutil.copytree(folders[0], tmp_path / "model"))
    (folder / name).unlink(missing_ok=True)
    (STANDS | ENDLESS)[kind](folder / name)
    if name in OTHERS:
        return refused_in_one_line(lambda: use(folder))
    with limited_memory(), pytest.raises(penstock.ConfigError, match=r"^[^\n]*config\.json[^\n]*$"):
        use(folder)
    return None


# DeepSpeed's checkpoints


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something is inside; of tensors, as a whole."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from leaves(item, (*path, key))


STRANGE: list[Any] = [
    *(None, True, 0, 1, -1, 3, 1 << 40, 1 << 62, 10**300, 0.5, float("inf"), float("nan"), "", "x", "a\nb", "\ud800"),
    *([], [1], (), (1, 2), {}, {"a": 1}, {1: 2}, torch.Size([3]), (1 << 31, 1 << 31), (-1,), ("x",), torch.float32),
    *(torch.zeros(()), torch.zeros(3), torch.zeros(0), torch.zeros(2, 2).t(), torch.zeros(1).expand(1 << 40)),
    *(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.complex64), torch.zeros(3).to_sparse()),
    *(
        torch.zeros(6)[::2],
        torch.empty(3, device="meta"),
        torch.nn.Parameter(torch.zeros(7)),
        torch.tensor(float("inf")),
    ),
]


@examples(60)
@given(data=st.data())
def test_checkpoints_of_deepspeed_of_anybody(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    top = tmp_path_factory.mktemp("deepspeed")
    name = data.draw(st.sampled_from(["z1-fp32-w2", "z2-bf16-w2", "z3-fp32-w2"]))
    folder = Path(shutil.copytree(DEEPSPEED / name / "third", top / "third"))
    file = data.draw(st.sampled_from(sorted(folder.iterdir())))
    if data.draw(st.integers(0, 3)) == 0:
        change_bytes(file, data)
    else:
        content = load(file)
        content.get("optimizer_state_dict", {}).pop("loss_scaler", None)
        for _ in range(data.draw(st.integers(1, 3))):
            path = data.draw(st.sampled_from(list(leaves(content))))
            holder = at(content, path[:-1])
            if data.draw(st.integers(0, 4)) == 0:
                del holder[path[-1]]
            else:
                holder[path[-1]] = deepcopy(data.draw(st.sampled_from(STRANGE)))
        torch.save(content, file)
    refused_in_one_line(lambda: import_checkpoint(folder, top / "out"))
    written = [path for path in (top / "out").glob("**/*") if path.is_file()] if (top / "out").exists() else []
    assert sum(path.stat().st_blocks * 512 for path in written) < 1 << 20
    shutil.rmtree(top)
