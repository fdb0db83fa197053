"""Which devices torch compiles kernels for, and how to have these kernels round as the host's do."""

from collections.abc import Callable
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch

Pass = Callable[..., None]

#: What Inductor is told of our functions alone. No product is contracted with a sum that it flows into; a quotient is
#: the nearest value; functions of the device's library keep denormals. Triton keeps them in plain operations, and its
#: square root is the nearest value without being told. torch 2.11 is the first release with all three.
ROUNDING: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}


def compile_pass(function: Callable[..., None], backend: Any = "inductor") -> Pass:
    """Return a compiled copy of a function, which rounds as the host does where `rounds_as_host` says so.

    Arguments:
        function: what to compile, in one graph for all sizes.
        backend: the compiler's back end, as `torch.compile` takes it.
    """
    assert isinstance(function, FunctionType)
    import torch._inductor.inductor_prims  # registers the fused multiply-add of `rules.exact`

    # A function is compiled anew for each combination of flags and dtypes, and after a few of one piece of code the
    # compiler gives up. So every rule and every format has a copy of its own.
    copy = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
    options = ROUNDING if backend == "inductor" and _knows_rounding() else None
    compiled: Pass = torch.compile(copy, fullgraph=True, dynamic=True, backend=backend, options=options)
    return compiled


def rounds_as_host(device: torch.device) -> bool:
    """Return True if compiled functions give the host's bits on a device: what is compiled for others was not read."""
    return device.type == "cuda" and torch.version.hip is None and _knows_rounding()


def _knows_rounding() -> bool:
    """Return True if this torch has every option of `ROUNDING`."""
    from torch._inductor import config

    return config.get_config_copy().keys() >= ROUNDING.keys()


def has_compiler(device: torch.device) -> bool:
    """Whether inductor makes kernels for a device: it knows the type of device, and the compiler behind it is there.

    The answer for a cpu is no: our native kernels are for the host. What is not seen here makes the first compilation
    fail, of which the user is warned once.
    """
    if device.type == "cpu":
        return False
    try:  # none of it is public: torch 2.8 to 2.13 have all of it, and what another one lacks is no reason to fail here
        from torch._dynamo.device_interface import DeviceInterface, get_registered_device_interfaces

        interface = dict(get_registered_device_interfaces()).get(device.type)
        if interface is None:
            return False
        from torch._inductor.codegen import common  # slow to import: not for devices that the compiler never heard of

        common.init_backend_registration()
        if common.get_scheduling_for_device(device.type) is None:
            return False
        if interface.is_triton_capable is DeviceInterface.is_triton_capable:
            return True  # its kernels are of another language
        if find_spec("triton") is None or not interface.is_triton_capable(device):
            return False
    except Exception:
        return device.type == "cuda" and find_spec("triton") is not None
    try:
        interface.raise_if_triton_unavailable(device)  # a triton of another make
    except Exception:
        return False
    return True
