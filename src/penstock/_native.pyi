"""The native module: addresses and lengths in, no tensors.

`penstock.rules` is its one caller for arithmetic, `penstock.runtime.aio` for files.
"""

import enum
from collections.abc import Sequence

class DType(enum.Enum):
    FP32 = 0
    BF16 = 1
    FP16 = 2

class Master(enum.Enum):
    NONE = 0
    REMAINDER = 1
    FP32 = 2

class Rule(enum.Enum):
    ADAM = 0
    AMSGRAD = 1
    SGD = 2
    SGD_MOMENTUM = 3
    ADAGRAD = 4
    LION = 5

class Storage(enum.Enum):
    FP32 = 0
    BF16 = 1
    BF16_RANDOM = 2
    INT8_SIGNED = 3
    INT8_UNSIGNED = 4

def isas() -> list[str]:
    """The instruction sets this processor can run, best first: "avx512", "avx2", "generic"; on AArch64 "neon"."""

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
        cores: the numbers of those that the threads which it starts run on, where the system allows it; none leaves
            them to the system.

    After a fork the child has no workers and runs everything in the caller.
    """

    def __init__(self, threads: int, cores: Sequence[int] = ()) -> None: ...
    @staticmethod
    def openmp(parallel: int) -> Pool:
        """Make a pool without threads of its own: work is done by the OpenMP threads of the caller.

        Args:
            parallel: the address of the runtime's `GOMP_parallel`.
        """

    @property
    def threads(self) -> int: ...
    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Copy memory by several threads. `dst` and `src` are addresses of ranges that do not overlap."""

    def close(self) -> None:
        """End and join the workers; later calls raise RuntimeError. May be called again."""

def update(
    pool: Pool | None,
    rule: Rule,
    numel: int,
    param: int,
    param_dtype: DType,
    grad: int,
    grad_dtype: DType,
    master: int,
    master_kind: Master,
    states: Sequence[tuple[int, int, Storage]],
    scalars: Sequence[float],
    *,
    param_random: bool,
    random_key: int,
    first_block: int,
    summed: Sequence[int] = (),
) -> list[tuple[int, int]]:
    """One fused pass of a rule, in place.

    Args:
        pool: the threads to use; None is the calling thread alone.
        rule: which arithmetic.
        numel: elements of every array.
        param: address of the parameter; likewise grad and master (0 where there is none).
        states: for each state its address, that of its scales (0 where there are none), and how it is stored.
        scalars: the factor on the gradient, the rule's scalars, and its flags; see `Rule` in csrc/kernels.h.
        param_random: round a bf16 parameter without master stochastically.
        random_key: of this step.
        first_block: number of the first block of 256 elements in the order of all parameters.
        summed: addresses of those of the arrays above, scales included, whose CRC-32C is taken in passing.

    Returns:
        For each of `summed` the CRC-32C of its values before and after.

    Raises:
        ValueError: no kernel for this combination, or an address in `summed` that is none of the arrays'.
    """

def deposit(
    pool: Pool | None, numel: int, dst: int, dst_dtype: DType, src: int, src_dtype: DType, *, add: bool
) -> float: ...
def squared_norm(pool: Pool | None, numel: int, src: int, dtype: DType) -> float: ...

class Wire(enum.Enum):
    INT8 = 0
    FP8 = 1
    INT4 = 2

def pack(pool: Pool | None, blocks: int, format: Wire, packed: int, values: int, dtype: DType) -> None:
    """Write blocks of 256 elements at `values` in a wire format at `packed`."""

def unpack(pool: Pool | None, blocks: int, format: Wire, values: int, dtype: DType, packed: int, *, add: bool) -> None:
    """Write what blocks in a wire format stand for to `values`, or add it.

    Raises:
        ValueError: `add` with values that are not fp32.
    """

END_OF_FILE: int
"""What `Transfer.error` is where a read met the end of the file."""

class File:
    """Owns an open descriptor and closes it with its last owner; transfers own theirs until they are done."""

    def __init__(self, descriptor: int) -> None: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def bytes_written(self) -> int: ...

class Transfer:
    """One read or write in flight. The other properties are there once it is `done`."""

    @property
    def done(self) -> bool: ...
    def wait(self, limit_ms: int) -> bool:
        """Block until done, at most `limit_ms`, without the interpreter; returns `done`.

        Raises:
            RuntimeError: this process was forked from the queue's owner, and the transfer was in flight then.
        """

    @property
    def error(self) -> int: ...
    @property
    def error_offset(self) -> int: ...
    @property
    def checksum(self) -> int: ...
    @property
    def ended(self) -> float:
        """When it was done, on the clock of `time.monotonic`."""

class Queue:
    """`depth` threads with one request each, of at most `chunk_bytes`.

    A process that was forked from the queue's owner can submit nothing.
    """

    def __init__(self, depth: int, chunk_bytes: int) -> None: ...
    @property
    def depth(self) -> int: ...
    def submit(self, file: File, *, write: bool, offset: int, memory: int, nbytes: int, checksum: bool) -> Transfer:
        """Start a transfer between a file and `nbytes` of memory, which must stay valid until it is done.

        Raises:
            ValueError: offset, address or length is no multiple of 4096.
            RuntimeError: the queue is closed, or belongs to the process that this one was forked from.
        """

    def close(self) -> None:
        """Finish what was submitted and join the threads. May be called again; does nothing in a forked process."""

def crc32c(memory: int, nbytes: int) -> int: ...
def crc32c_join(a: int, b: int, b_nbytes: int) -> int:
    """The CRC-32C of bytes A followed by B, of theirs and the length of B."""

def crc32c_ways() -> list[str]:
    """What this processor can compute it by: from "portable", a table, to the fastest, which `crc32c` takes."""

def crc32c_by(way: str, memory: int, nbytes: int) -> int:
    """The same by one of them."""
