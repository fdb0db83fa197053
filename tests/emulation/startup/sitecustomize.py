"""Make the mode of the emulation in every Python process that has this folder on its path, once torch is there."""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODE = os.environ.get("FAKE_MODE", "A")


class _After(MetaPathFinder):
    """Calls a function with a module as soon as that has been imported."""

    def __init__(self, name: str, function: Callable[[ModuleType], object]) -> None:
        self._name, self._function = name, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._function(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _prepare(torch: ModuleType) -> None:
    """Do without cuDNN, which wants a device; compute values from the first use of CUDA on: forks may precede."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.enabled = False

    def install() -> None:
        import fakeoperators  # type: ignore[import-not-found]

        fakeoperators.install()

    if MODE in ("B", "C"):
        torch.cuda._lazy_call(install)


def _values_of_triton(helpers: ModuleType) -> None:
    """Give the interpreter what it lacks."""
    import interpreting

    interpreting.patch(helpers)


sys.meta_path.insert(0, _After("torch", _prepare))
if MODE == "C":
    os.environ["TRITON_INTERPRET"] = "1"
    sys.meta_path.insert(0, _After("torch._inductor.runtime.triton_helpers", _values_of_triton))
