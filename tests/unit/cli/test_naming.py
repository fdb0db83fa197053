"""Errors of the library, in the words of the command line."""

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.cli.naming import NAMED, in_options, naming_options
from penstock.cli.training.config import TrainConfig
from penstock.errors import ConfigError, NvmeError, PenstockError


def prepared(**arguments: Any) -> Callable[[], Any]:
    def prepare() -> Any:
        model = torch.nn.Linear(64, 64)
        optimizer = arguments.pop("optimizer", torch.optim.AdamW)
        return penstock.prepare(model, optimizer(model.parameters()), **arguments)

    return prepare


def options(**values: Any) -> Callable[[], Any]:
    return lambda: penstock.Options(**values)


def placement(**values: Any) -> Callable[[], Any]:
    return lambda: penstock.Placement(**values)


RAISED: list[tuple[Callable[[], Any], str]] = [
    (options(tile_bytes=1), "--tile-bytes 1: use a whole number of bytes, 4096 or more."),
    (options(live_bytes=0), "--live-bytes 0: use a whole number of bytes, 1 or more."),
    (options(prefetch_bytes=-1), "--prefetch-bytes -1: use a whole number of bytes, 0 or more."),
    (options(update_threads=0), "--update-threads 0: use a whole number, 1 or more."),
    (options(streamed_updates=1.5), "--streamed-updates 1.5: use a number from 0 to 1, or 'auto'."),
    (options(state_dtype="fp64"), "--state-dtype fp64: use one of 'fp32', 'bf16', 'int8'."),
    (placement(params="moon"), "--params moon is not a tier. Use one of 'device', 'cpu', 'nvme'."),
    (placement(params=""), "--params '' is not a tier."),
    (placement(activations="moon"), "--activations moon is not a tier."),
    (placement(grads={"cpu": 0.5}), "The fractions of --grads cpu=0.5 sum to 0.5. Make them sum to 1."),
    (placement(optimizer={"cpu": 2}), "--optimizer cpu=2 is not a fraction. Use a number from 0 to 1."),
    (placement(params={"cpu": 0.5, "gpu": 0.5, "device": 0}), "--params cpu=0.5,gpu=0.5,device=0 names the tier"),
    (prepared(stage=5), "--stage 5: use 0 (nothing sharded), 1, 2 or 3."),
    (prepared(precision="fp8"), "--precision fp8: use one of "),
    (prepared(overlap="now"), "--overlap now: use one of "),
    (
        prepared(placement=penstock.Placement(optimizer={"nvme": 0.5, "cpu": 0.5})),
        "--optimizer nvme=0.5,cpu=0.5 needs a folder for its files. Name one on a fast disk: --nvme-path.",
    ),
    (
        prepared(max_grad_norm=1.0, overlap="backward"),
        "--max-grad-norm 1.0 needs the whole gradient, and --overlap backward updates before it is there. Use "
        "--overlap forward, or --max-grad-norm 0.",
    ),
    (
        prepared(precision="fp16", overlap="backward"),
        "--overlap backward with --precision fp16 needs a static loss scale: a step that overflows could not be "
        "skipped whole. Use --overlap forward.",
    ),
    (
        prepared(options=penstock.Options(live_bytes=100)),
        "--live-bytes 100 is 8,604 bytes too small: unit 'root' and the units around it take 8,704 bytes when "
        "gathered. Raise --live-bytes.",
    ),
    (
        prepared(optimizer=torch.optim.Rprop, options=penstock.Options(state_dtype="int8")),
        "--state-dtype int8 is not for rprop",
    ),
    (
        prepared(placement=penstock.Placement(optimizer="nvme", nvme_path="missing-folder")),
        "--nvme-path 'missing-folder' cannot be found (No such file or directory). Create it, or choose another folder "
        "with --nvme-path.",
    ),
]


@pytest.mark.parametrize(("raising", "message"), RAISED, ids=lambda value: value[:30] if isinstance(value, str) else "")
def test_what_the_library_refuses_is_said_in_options(raising: Callable[[], Any], message: str) -> None:
    with pytest.raises(PenstockError) as caught, naming_options():
        raising()
    assert str(caught.value).startswith(message)
    assert not re.search(r"\b(Options|Placement|prepare)\(|\w=['{]", str(caught.value))


#: Messages that need a device, a full disk or a long run to be raised.
SAID = [
    (
        "memory, 5 more than Options(pinned_bytes=5,000). Raise it, choose a smaller tile_bytes, or keep",
        "memory, 5 more than --pinned-bytes 5,000. Raise it, choose a smaller --tile-bytes, or keep",
    ),
    ("The compute dtype is prepare(precision=).", "The compute dtype is prepare(precision=)."),
    (
        "3 steps in a row were skipped. Options(max_skipped_steps=None) goes on for ever.",
        "3 steps in a row were skipped. Use a smaller --lr, or --precision bf16 or fp32.",
    ),
    ("read NaN; or use Options(on_nonfinite='skip').", "read NaN."),
    (
        "the state is of no step. Close the optimizer and go back to a checkpoint; overlap='forward' skips such steps",
        "the state is of no step. Go on from a checkpoint with --resume; --overlap forward skips such steps",
    ),
    (
        "head(x). Call penstock.losses.linear_cross_entropy in a forward of your own, or train without chunk_loss.",
        "head(x). Train without --chunked-loss.",
    ),
    (
        "free. Keep less there, or choose another folder with Placement(nvme_path=...).",
        "free. Keep less there, or choose another folder with --nvme-path.",
    ),
]


@pytest.mark.parametrize(("said", "named"), SAID)
def test_messages_of_long_runs(said: str, named: str) -> None:
    assert in_options(said) == named


#: What no option of the command leads to.
NOT_REACHED = {"Options(cast_inputs='none')", "Placement(params='device') at stage 2"}
ARGUMENT = re.compile(rf"(Options|Placement)\((?!7=)|(?<![\w.-])({'|'.join(NAMED)})='")


def messages_of_the_library() -> Iterator[str]:
    """Every message of an error below the command line, its values written as 7."""
    folder = Path(penstock.__file__).parent
    for path in folder.rglob("*.py"):
        text = path.read_text()
        if path.relative_to(folder).parts[0] in ("cli", "integrations") or not ARGUMENT.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error") and node.args):
                continue
            parts = node.args[0].values if isinstance(node.args[0], ast.JoinedStr) else [node.args[0]]
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "7" for part in parts)


def test_no_message_names_an_argument_for_which_there_is_an_option() -> None:
    """Also those that nobody has thought of: a new message of the library is found here."""
    messages = [text for text in messages_of_the_library() if not any(said in text for said in NOT_REACHED)]
    assert sum(ARGUMENT.search(text) is not None for text in messages) >= 10
    for text in messages:
        assert not ARGUMENT.search(in_options(text)), text


@pytest.mark.parametrize(
    "text",
    [
        "/data/live_bytes/x.jsonl: its field 'stage=3' and live_bytes.txt are no text",
        "the stage of the optimizer, and its params",
        "--live-bytes 3 --optimizer cpu=0.5 --nvme-path",
        "tensor.overlap='forward'",
    ],
)
def test_what_is_no_argument_stays(text: str) -> None:
    assert in_options(text) == text


def test_it_is_the_same_error(tmp_path: Path) -> None:
    error = NvmeError("choose Placement(nvme_path=...)", file="f", offset=3, errno=28)
    with pytest.raises(NvmeError) as caught, naming_options():
        raise error
    assert caught.value is error
    assert (str(error), error.file, error.offset, error.errno) == ("choose --nvme-path", "f", 3, 28)


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match=r"^stage=3$"), naming_options():
        raise ValueError("stage=3")


def test_every_name_is_an_option_and_an_argument_of_the_library() -> None:
    assert {*NAMED} <= {field.name for field in dataclasses.fields(TrainConfig)}
    of_library = {field.name for kind in (penstock.Options, penstock.Placement) for field in dataclasses.fields(kind)}
    ours = {field.name for field in dataclasses.fields(TrainConfig)} & of_library
    assert ours <= {*NAMED}


@pytest.mark.parametrize("home", ["--params", "--grads", "--optimizer", "--activations"])
def test_state_on_nvme_without_a_folder_is_refused_before_anything_is_read(
    penstock_command: Callable[..., Any], home: str
) -> None:
    """The data is not there: that nobody says so shows that nobody looked."""
    outcome = penstock_command("train", home, "nvme", "--data", "missing.txt", "--model", "missing")
    assert outcome.exit_code == 2
    assert outcome.err == (
        f"penstock: error: {home} puts state on nvme, which needs a folder for its files. Name one on a fast disk with "
        "--nvme-path.\n"
    )
    with pytest.raises(ConfigError, match="--nvme-path"):
        TrainConfig(**{home[2:]: "nvme"})
    TrainConfig(**{home[2:]: "nvme", "nvme_path": ("p",)})


def test_a_part_on_nvme_and_another_name_of_it_count() -> None:
    for optimizer in ({"cpu": 0.5, "nvme": 0.5}, "disk"):
        with pytest.raises(ConfigError, match="--optimizer puts state on nvme"):
            TrainConfig(optimizer=optimizer)


def test_homes_and_sizes_are_checked_as_settings() -> None:
    with pytest.raises(ConfigError, match=r"^--params moon is not a tier"):
        TrainConfig(params="moon")
    with pytest.raises(ConfigError, match=r"^--tile-bytes 1: use a whole number"):
        TrainConfig(tile_bytes=1)


def test_the_whole_run_names_options(penstock_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(config: TrainConfig, interruption: object) -> bool:
        raise ConfigError("overlap='forward' is too small. Raise live_bytes.")

    monkeypatch.setattr("penstock.cli.training.run.run", run)
    assert penstock_command("train").err == "penstock: error: --overlap forward is too small. Raise --live-bytes.\n"
