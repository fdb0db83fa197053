"""Which instruction set the native kernels use here."""

from penstock import _native


def instruction_set() -> str:
    """Return the one in use: "avx512", "avx2", "neon" or "generic"."""
    return _native.isa()
