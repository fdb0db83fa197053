"""Whether torch compiles kernels for a device."""

from importlib.util import find_spec

import torch


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
