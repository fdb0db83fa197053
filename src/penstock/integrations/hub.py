"""Models by their names on a hub, as folders in the cache of this machine."""

import os
import re
from pathlib import Path

from penstock.errors import ConfigError, one_line

# owner/name, and a revision (branch, tag or commit) behind it where one is asked for.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(?:@[\w./-]{1,255})?", re.ASCII)
#: The files that are fetched: weights that run nothing, and the files beside them. Code only if it may run.
_WEIGHTS = ("*.safetensors",)
_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_CODE = ("*.py",)


def is_hub_name(name: str) -> bool:
    """Return True if a name is one of a hub, `owner/name` or `owner/name@revision`, and no path.

    A name whose first part exists in this folder, also as a dangling link, is a path: a misspelt path is not looked up
    on the hub.

    Example:
        >>> is_hub_name("meta-llama/Llama-3.1-8B"), is_hub_name("/no/model"), is_hub_name("./model")
        (True, False, False)
    """
    return _NAME.fullmatch(name) is not None and not os.path.lexists(name.split("/")[0])


def fetch_model(name: str, *, code: bool = False, weights: bool = True) -> Path:
    """Find a model of the hub on this machine, or fetch it into the cache of `huggingface_hub`.

    Nothing is fetched with `HF_HUB_OFFLINE=1`; `HF_HOME`, `HF_TOKEN` and `HF_ENDPOINT` work as they do elsewhere.
    Processes that ask at the same time wait for one of them.

    Arguments:
        name: `owner/name`, or `owner/name@revision`.
        code: True if code in the repository may run. It is fetched as well.
        weights: True if weights are fetched.

    Returns:
        A folder.

    Raises:
        ConfigError: there is no such model, or it cannot be fetched: no network, no permission, no room.
    """
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    patterns = [*(_WEIGHTS if weights else ()), *_FILES, *(_CODE if code else ())]
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # of the network, the hub, the disk
        raise ConfigError(
            f"--model {name!r} is no folder here, and the hub did not give it: {one_line(error).rstrip('.')}. Name a "
            "folder, or check the name, the network and HF_TOKEN."
        ) from error
