"""What the libraries read of the environment when they are imported."""

import argparse
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.files import read_mapping
from penstock.train.run_file import SHORT

#: Fields that name a model or data: paths, or names of a hub.
_NAMES = ("model_name_or_path", "dataset_name", "chat_template_path")
#: Fields that need a hub, whatever they say.
_OF_HUBS = ("push_to_hub", "hub_model_id", "datasets", "attn_implementation", "model_init_kwargs", "trackio_space_id")


def prepare_environment(argv: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Keep libraries from telling hubs about the run, and from asking them where model and data are local.

    Nothing that is set already changes.
    """
    environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if is_local(argv):
        environ.setdefault("HF_HUB_OFFLINE", "1")


def is_local(argv: Sequence[str]) -> bool:
    """Return True if everything that the command line, and its file, name is on this machine."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    for name in (*_NAMES, *_OF_HUBS, *SHORT):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, nargs="*", action="extend")
    try:
        typed = vars(parser.parse_known_args(list(argv))[0])
    except (argparse.ArgumentError, SystemExit):
        return False  # the parser of all options says what is wrong
    said: dict[str, Any] = {}
    with suppress(PenstockError):
        said = read_mapping(Path(typed["config"])) if typed["config"] else {}
    said |= {name: value for name, value in typed.items() if value is not None}
    if any(said.get(name, False) not in (None, False, ["false"], ["False"]) for name in _OF_HUBS):
        return False
    named = [said[name] for name in (*_NAMES, *SHORT) if name != "out" and said.get(name)]
    return all(_is_here(name) for names in named for name in ([names] if isinstance(names, str) else names))


def _is_here(name: Any) -> bool:
    """Return True if a name is a path that there is, with a weight or without, or a pattern of paths."""
    return any(Path(text).exists() or "*" in text for text in (str(name), str(name).rpartition(":")[0]) if text)
