"""The public names and their signatures are frozen: a change here is a change for users."""

import dataclasses
import inspect
import subprocess
import sys

import pytest
import torch

import penstock

NAMES = [
    "EMA",
    "CheckpointError",
    "ConfigError",
    "EngineError",
    "Location",
    "LocationReport",
    "MemoryBudgetError",
    "NvmeError",
    "Optimizer",
    "Options",
    "PenstockError",
    "Placement",
    "StepResult",
    "elementwise",
    "export",
    "prepare",
]

PREPARE = (
    "(model, optimizer, *, stage=3, placement=None, precision='bf16', units=None, mesh=None, max_grad_norm=None, "
    "grad_accumulation_dtype=None, reduce_dtype=None, overlap='auto', master='remainder', "
    "options=Options())"
)
OPTIMIZER = {
    "backward": "(self, loss, *, retain_graph=False)",
    "step": "(self, closure=None)",
    "zero_grad": "(self, set_to_none=True)",
    "no_sync": "(self)",
    "clip_grad_norm_": "(self, max_norm, norm_type=2.0)",
    "offload_states": "(self, include=None, to='cpu', *, pin_memory=True, non_blocking=False, keep=False)",
    "reload_states": "(self, *, non_blocking=False)",
    "locations": "(self)",
    "gathered": "(self, parameters=None, *, modify=False)",
    "full_param": "(self, parameter)",
    "full_grad": "(self, parameter)",
    "full_state": "(self, parameter, name)",
    "set_full_param": "(self, parameter, value)",
    "set_full_grad": "(self, parameter, value)",
    "set_full_state": "(self, parameter, name, value)",
    "save": "(self, path, *, extra=None, blocking=True, keep=None, if_busy='wait', frozen=True)",
    "load": "(self, path, *, verify=None)",
    "synchronize": "(self)",
    "trace": "(self, path)",
    "record": "(self, folder, *, begin=0, config=None)",
    "close": "(self, *, keep_params=True)",
}
REPORT = {
    "bytes": "(self, *, kind=None, tier=None, unit=None)",
    "assert_on": "(self, kind, tier)",
    "to_dict": "(self)",
}
FIELDS = {
    "Placement": {
        "params": "device",
        "grads": "device",
        "optimizer": "device",
        "activations": None,
        "nvme_path": None,
    },
    "Options": {
        "prefetch_bytes": 1 << 30,
        "live_bytes": 4 << 30,
        "persistent_bytes": 0,
        "tile_bytes": 4 << 20,
        "device_bytes": None,
        "pinned_bytes": None,
        "host_bytes": None,
        "update_threads": None,
        "streamed_updates": 0.0,
        "whole_updates": "device",
        "io_queue_depth": 16,
        "checksums": True,
        "on_nonfinite": "skip",
        "max_skipped_steps": 100,
        "reduce_op": "mean",
        "state_dtype": "fp32",
        "rounding": "stochastic",
        "rounding_seed": 0,
        "initial_loss_scale": 65536.0,
        "dynamic_loss_scale": True,
        "debug_release": False,
        "timeout_s": 600.0,
        "cast_inputs": "units",
        "gather_format": "exact",
        "reduce_format": "exact",
        "secondary_shard": None,
    },
    "StepResult": dict.fromkeys(("grad_norm", "skipped", "loss_scale"), dataclasses.MISSING) | {"loss": None},
    "Location": dict.fromkeys(
        ("unit", "kind", "tier", "dtype", "numel", "nbytes", "pinned", "in_flight"), dataclasses.MISSING
    ),
}
ERRORS = {
    "ConfigError": ValueError,
    "MemoryBudgetError": Exception,
    "NvmeError": OSError,
    "CheckpointError": Exception,
    "EngineError": RuntimeError,
}


def signature(function: object) -> str:
    """Names, kinds and defaults of the parameters."""
    found = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    text = str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return text.replace(repr(penstock.Options()), "Options()")


def test_public_names() -> None:
    assert penstock.__all__ == NAMES
    assert len(NAMES) <= 20
    assert all(hasattr(penstock, name) for name in NAMES)
    assert set(NAMES) <= set(dir(penstock))
    with pytest.raises(AttributeError, match="no_such_name"):
        penstock.no_such_name  # noqa: B018


def test_prepare() -> None:
    assert signature(penstock.prepare) == PREPARE[:-1] + ", weights=None, plan=None, batch=None)"


def test_export() -> None:
    expected = "(checkpoint, out, *, dtype='bf16', adapters_only=True, max_shard_bytes=5000000000, average=False"
    assert signature(penstock.export) == expected + ", merge_adapters=False, base=None)"


def test_optimizer() -> None:
    assert issubclass(penstock.Optimizer, torch.optim.Optimizer)
    inherited = set(dir(torch.optim.Optimizer)) - {"step", "zero_grad"}
    own = {name for name in dir(penstock.Optimizer) if not name.startswith("_")} - inherited
    assert isinstance(penstock.Optimizer.plan, property)
    assert {name: signature(getattr(penstock.Optimizer, name)) for name in own - {"plan"}} == OPTIMIZER


def test_report() -> None:
    own = {name for name in vars(penstock.LocationReport) if not name.startswith("_")}
    assert {name: signature(getattr(penstock.LocationReport, name)) for name in own} == REPORT


@pytest.mark.parametrize("name", FIELDS)
def test_values(name: str) -> None:
    cls = getattr(penstock, name)
    assert {f.name: f.default for f in dataclasses.fields(cls)} == FIELDS[name]
    assert cls.__dataclass_params__.frozen


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    error = getattr(penstock, name)
    assert issubclass(error, penstock.PenstockError)
    assert issubclass(error, ERRORS[name])


def imported_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return {name.split(".")[0] for name in done.stdout.split()}


def test_importing_the_names_imports_nothing_that_training_does_not_need() -> None:
    heavy = {"transformers", "rich", "typer", "tensorboard", "safetensors", "datasets", "tokenizers"}
    assert not heavy & imported_by("import penstock; [getattr(penstock, name) for name in penstock.__all__]")


#: Each in a process of its own, which has torch already: what one imports is not there for the next.
LOOKS = """
import os, sys, torch
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        import penstock
        assert getattr(penstock, name).__name__ == f"penstock.{name}"
        assert name in dir(penstock)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""


def test_modules_that_pages_use_are_there_after_the_import_of_the_package() -> None:
    """`penstock.optim.register` was an `AttributeError` unless something else had imported the module."""
    names = ("integrations", "losses", "optim", "parallel", "planner", "ring", "footprint")
    done = subprocess.run([sys.executable, "-c", LOOKS, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
