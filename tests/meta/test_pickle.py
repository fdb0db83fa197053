"""No pickle is ever loaded: whoever writes one chooses what runs where it is read, be it a file or another rank."""

import ast
import builtins
import functools
from collections.abc import Iterator

import pytest
import torch

from penstock.ext.interop import dcp, deepspeed, pickled
from tests.meta.source import modules, path_of

#: The one reader of pickles that others wrote: it executes opcodes itself, and calls what a closed list of names has.
READER = "ext.interop.pickled"

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


def test_no_module_loads_a_pickle() -> None:
    others = (module for module in modules() if module != READER)
    found = [f"{path_of(module)}, {use}" for module in others for use in uses(modules()[module])]
    assert not found, "\n".join(found)


def test_the_one_reader_calls_what_its_list_names() -> None:
    """It loads no pickle, looks names up in its list alone, and imports nothing."""
    tree = modules()[READER]
    assert [use.partition(": ")[2] for use in uses(tree)] == ["import pickletools"]
    (machine,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "_Machine")
    methods = {node.name: node for node in machine.body if isinstance(node, ast.FunctionDef)}
    looked_up = [ast.unparse(node) for node in ast.walk(machine) if isinstance(node, ast.Subscript)]
    assert [part for part in looked_up if "_names" in part] == ["self._names[name]"]
    assert ast.unparse(methods["_find"].body[-1]) == "self._refer(self._names[name])"
    calls = [node for node in ast.walk(machine) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    ours = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    others = [ast.unparse(call) for call in calls if ast.unparse(call.func) not in ours | set(dir(builtins))]
    assert others == ["function(*arguments)"]
    named = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert not named & {"getattr", "eval", "exec", "compile", "__import__", "globals", "vars"}


def test_nothing_that_a_pickle_makes_can_be_called() -> None:
    """But the stand-ins of its list."""
    made = [None, True, 1, 0.5, "text", b"bytes", (), [], {}, pickled.Made("a"), pickled.Stored(torch.float32, "0")]
    assert not [value for value in (*made, *pickled.DTYPE_NAMES.values()) if callable(value)]


def test_stand_ins_are_our_own() -> None:
    """Of torch there are dtypes, which are constants."""
    for name, stand_in in {**pickled.TENSOR_NAMES, **dcp._IN_INDEX, **deepspeed._NAMES}.items():
        function = stand_in.func if isinstance(stand_in, functools.partial) else stand_in
        assert isinstance(stand_in, torch.dtype) or function.__module__.startswith("penstock."), name


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
