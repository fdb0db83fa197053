"""Versions, the accelerator that torch sees, and the instruction set of the kernels."""

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from penstock.doctor.finding import Finding, broken, fine, slow
from penstock.errors import one_line
from penstock.probe.fingerprint import DRIVER, accelerator, cpu_model, driver
from penstock.rules.rule import instruction_set
from penstock.runtime.hardware import default_device

#: Libraries that are told of where they are installed: each has loops or files that Penstock reads.
BESIDE = ("transformers", "accelerate", "trl", "lightning", "peft", "datasets", "deepspeed")
#: Where the drivers of accelerators say that they are loaded.
DRIVERS = {"an NVIDIA": DRIVER, "an AMD": Path("/sys/module/amdgpu/initstate")}
_OF_INSTRUCTIONS = {
    "avx512": "",
    "avx2": "",
    "generic": "The processor has no AVX2: updates on the host are several times slower. Keep the optimizer on the "
    'device, Placement(optimizer="device"), or use another machine.',
}


def versions() -> Iterator[Finding]:
    """Tell the versions of what runs."""
    yield fine("penstock", version("penstock"))
    yield fine("python", f"{platform.python_version()}, {one_line(sys.executable)}")
    yield fine("torch", torch.__version__)
    found = []
    for name in BESIDE:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    yield fine("libraries", ", ".join(found) or "none of those that Penstock has a border to")
    yield fine("system", f"{platform.system()} {platform.release()}, {platform.machine()}")


def devices(drivers: dict[str, Path] = DRIVERS) -> Iterator[Finding]:
    """Tell which device computes, and whether one is there that torch does not see.

    Arguments:
        drivers: the files that drivers have while they are loaded, by whose they are.
    """
    device = default_device()
    if device.type != "cpu":
        name, nbytes, count = accelerator(device)
        yield fine("device", f"{count} x {name}, {nbytes / 2**30:.1f} GiB, {device.type} {driver(device)}".rstrip())
        return
    hidden = [words for words in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if os.environ.get(words) in ("", "-1")]
    loaded = [whose for whose, file in drivers.items() if file.exists()]
    if loaded and hidden:
        yield slow("device", f"the cpu: {hidden[0]} hides the others", f"Unset {hidden[0]}.")
    elif loaded:
        built = torch.version.cuda or getattr(torch.version, "hip", None)
        why = f"torch is built for {built} and finds no device" if built else "torch is built for the cpu alone"
        yield broken(
            "device",
            f"the cpu, though {loaded[0]} driver is loaded: {why}",
            "Install a torch that is built for the driver (pytorch.org has the command), and see that nvidia-smi or "
            "rocm-smi works, in the container too.",
        )
    else:
        yield fine("device", "the cpu; no accelerator's driver is loaded")


def processor() -> Iterator[Finding]:
    """Tell which processor computes updates on the host, and with which instructions."""
    yield fine("processor", cpu_model())
    chosen = instruction_set()
    mend = _OF_INSTRUCTIONS.get(chosen, "") if platform.machine() == "x86_64" else ""
    yield slow("instructions", chosen, mend) if mend else fine("instructions", chosen)
