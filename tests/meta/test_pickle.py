"""No pickle is ever loaded: whoever writes one chooses what runs where it is read, be it a file or another rank."""

import ast
from collections.abc import Iterator

import pytest
import torch

from penstock.integrations import deepspeed, pickled
from penstock.integrations.dcp import files
from tests.meta.source import modules

#: The one reader of pickles that others wrote: `find_class` knows a closed list of names, and stand-ins for them.
READER = "integrations.pickled"

#: Modules that make objects of bytes, or hand them to code that does.
MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "pickletools",
    "cloudpickle",
    "copyreg",
    "dill",
    "joblib",
    "marshal",
    "shelve",
}
MODULES |= {"multiprocessing", "torch.multiprocessing"}  # their queues and pipes pickle what goes through them

#: Names that load or send pickles, wherever they come from. Of torch.distributed: all collectives of Python objects.
NAMES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
    "_object_to_tensor",
    "_tensor_to_object",
    "Unpickler",
    "allow_pickle",
    "load_state_dict_from_url",
    "read_pickle",
}

#: The module of a function `load` that reads pickles, as it may be written.
LOADERS = {"torch", "numpy", "np", "torch.serialization", "torch.jit", "torch.package", "distcp", "dcp"}


def uses(tree: ast.AST) -> Iterator[str]:
    """Give each use of a pickle in a module: what is imported, called or named."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"line {node.lineno}: import {a.name}" for a in node.names if a.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            if node.module in MODULES or names & NAMES or names & MODULES:
                yield f"line {node.lineno}: {ast.unparse(node)}"
            if node.module in LOADERS and "load" in names:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if node.attr in NAMES or (node.attr == "load" and owner in LOADERS) or f"{owner}.{node.attr}" in MODULES:
                yield f"line {node.lineno}: {owner}.{node.attr}"
        elif isinstance(node, ast.Call):
            words = [keyword.arg for keyword in node.keywords]
            by_name = ast.unparse(node.func) in ("import_module", "importlib.import_module", "__import__")
            if "allow_pickle" in words or (by_name and {ast.unparse(a).strip("'\"") for a in node.args} & MODULES):
                yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("module", [module for module in modules() if module != READER])
def test_no_module_loads_a_pickle(module: str) -> None:
    assert not list(uses(modules()[module]))


def test_the_one_reader_makes_what_its_list_names() -> None:
    """Its unpickler is used where the scan has passed, finds names in its list alone, and imports nothing."""
    tree = modules()[READER]
    found = [use.partition(": ")[2] for use in uses(tree)]
    assert found == ["import pickle", "import pickletools", "pickle.Unpickler"]
    (unpickler,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "_Unpickler")
    assert [ast.unparse(base) for base in unpickler.bases] == ["pickle.Unpickler"]
    (find_class,) = (n for n in unpickler.body if isinstance(n, ast.FunctionDef) and n.name == "find_class")
    assert [ast.unparse(n) for n in ast.walk(find_class) if isinstance(n, ast.Return)] == ["return self._names[whole]"]
    (read,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "read_value")
    called = [ast.unparse(n.func) for n in ast.walk(read) if isinstance(n, ast.Call)]
    assert called.index("_scan") < called.index("_Unpickler")
    named = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert not named & {"getattr", "eval", "exec", "compile", "__import__", "globals", "vars"}
    assert sum(isinstance(n, ast.Call) and ast.unparse(n.func) == "_Unpickler" for n in ast.walk(tree)) == 1


def test_stand_ins_are_our_own() -> None:
    """Of torch there are dtypes, which are constants."""
    for name, stand_in in {**pickled.TENSOR_NAMES, **files._IN_INDEX, **deepspeed._NAMES}.items():
        assert isinstance(stand_in, torch.dtype) or stand_in.__module__.startswith("penstock."), name


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(path, weights_only=True)",
        "from torch import load",
        "import torch.distributed as dist\ndist.all_gather_object(out, value)",
        "from torch.distributed import broadcast_object_list",
        "import numpy as np\nnp.load(path)",
        "import torch\ntorch.multiprocessing.spawn(run)",
        "from importlib import import_module\nimport_module('pickle').loads(data)",
    ],
)
def test_uses_are_found(source: str) -> None:
    assert list(uses(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["import json\njson.load(file)", "optimizer.load(path)", "safetensors.torch.load(b)"]
)
def test_other_loads_are_let_pass(source: str) -> None:
    assert not list(uses(ast.parse(source)))
