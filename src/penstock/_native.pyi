"""The native module: addresses and lengths in, no tensors. `penstock.rules.native` is its one caller for arithmetic."""

import enum

class DType(enum.Enum):
    FP32 = 0
    BF16 = 1
    FP16 = 2

class Master(enum.Enum):
    NONE = 0
    REMAINDER = 1
    FP32 = 2

def isas() -> list[str]:
    """The instruction sets this processor can run, best first; the last is "generic"."""

def isa() -> str:
    """The instruction set in use, of the whole process."""

def set_isa(name: str) -> None:
    """Use another instruction set, for tests: results do not depend on it.

    Raises:
        ValueError: this machine has no such instruction set.
    """

class Pool:
    """A pool of threads for work on host memory; several Python threads may use one at once.

    Args:
        threads: how many threads take part in one call, the calling thread included. 1 starts none.

    After a fork the child has no workers and runs everything in the caller.
    """

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...
    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Copy memory by several threads. `dst` and `src` are addresses of ranges that do not overlap."""

    def close(self) -> None:
        """End and join the workers; later calls raise RuntimeError. May be called again."""

def adam(
    pool: Pool | None,
    numel: int,
    param: int,
    param_dtype: DType,
    grad: int,
    grad_dtype: DType,
    master: int,
    master_kind: Master,
    exp_avg: int,
    exp_avg_sq: int,
    *,
    grad_scale: float,
    l2: float,
    decay: float,
    lerp_weight: float,
    lerp_from_grad: bool,
    beta2: float,
    grad_sq_weight: float,
    bias2_sqrt: float,
    eps: float,
    neg_step_size: float,
) -> None: ...
def deposit(
    pool: Pool | None, numel: int, dst: int, dst_dtype: DType, src: int, src_dtype: DType, *, add: bool
) -> float: ...
def squared_norm(pool: Pool | None, numel: int, src: int, dtype: DType) -> float: ...
