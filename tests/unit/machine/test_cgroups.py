"""What containers and jobs leave of their machine, with control groups made of folders."""

from pathlib import Path

import pytest

from penstock.runtime.system import MemoryLimit, core_quota, memory_left

GIB = 1 << 30
NO_LIMIT = "9223372036854771712"


class Machine:
    """Hierarchies in a folder, and a list of the groups of a process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cgroup"
        self.own = folder / "own"
        self.own.write_text("")

    def process(self, *lines: str) -> "Machine":
        self.own.write_text("\n".join(lines) + "\n")
        return self

    def group(self, path: str, **files: str) -> "Machine":
        """A group with its files; `memory_max` is `memory.max`."""
        group = self.folder / path
        group.mkdir(parents=True, exist_ok=True)
        (group / "cgroup.procs").write_text("")
        for name, text in files.items():
            (group / name.replace("_", ".", 1)).write_text(text + "\n")
        return self

    @property
    def left(self) -> MemoryLimit | None:
        return memory_left(self.folder, self.own)

    @property
    def cores(self) -> float | None:
        return core_quota(self.folder, self.own)

    def of(self, nbytes: int, file: str) -> MemoryLimit:
        return MemoryLimit(nbytes, str(self.folder / file))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_version_2(machine: Machine) -> None:
    machine.process("0::/job")
    machine.group("").group("job", memory_max=f"{8 * GIB}", memory_current=f"{3 * GIB}", cpu_max="250000 100000")
    assert machine.left == machine.of(5 * GIB, "job/memory.max")
    assert machine.cores == 2.5
    machine.group("job", memory_stat=f"anon 5\ninactive_file {GIB}\nactive_file {GIB // 2}\nshmem 7")
    assert machine.left == machine.of(6 * GIB + GIB // 2, "job/memory.max"), "the page cache is given up"


def test_above_high_a_group_crawls(machine: Machine) -> None:
    machine.process("0::/job").group("")
    machine.group("job", memory_max=f"{8 * GIB}", memory_high=f"{4 * GIB}", memory_current=f"{3 * GIB}")
    assert machine.left == machine.of(GIB, "job/memory.high")


def test_version_1(machine: Machine) -> None:
    machine.process("5:memory:/job", "4:cpu,cpuacct:/job", "3:cpuset:/", "1:name=systemd:/init.scope")
    machine.group("memory", memory_limit_in_bytes=NO_LIMIT, memory_usage_in_bytes=f"{9 * GIB}")
    machine.group("cpu,cpuacct", cpu_cfs_quota_us="-1", cpu_cfs_period_us="100000")
    machine.group(
        "memory/job",
        memory_limit_in_bytes=f"{8 * GIB}",
        memory_usage_in_bytes=f"{6 * GIB}",
        memory_stat=f"inactive_file 1\ntotal_inactive_file {2 * GIB}\ntotal_active_file 0",
    )
    machine.group("cpu,cpuacct/job", cpu_cfs_quota_us="400000", cpu_cfs_period_us="100000")
    assert machine.left == machine.of(4 * GIB, "memory/job/memory.limit_in_bytes")
    assert machine.cores == 4


@pytest.mark.parametrize("tightest", ["pod", "pod/job", "pod/job/step"])
def test_what_is_set_for_a_group_holds_for_all_below_it(machine: Machine, tightest: str) -> None:
    machine.process("0::/pod/job/step").group("")
    for group in ("pod", "pod/job", "pod/job/step"):
        limit, quota = (2, 1) if group == tightest else (4, 3)
        machine.group(group, memory_max=f"{limit * GIB}", memory_current=f"{GIB}", cpu_max=f"{quota * 100_000} 100000")
    assert machine.left == machine.of(GIB, f"{tightest}/memory.max")
    assert machine.cores == 1


def test_a_hybrid_machine(machine: Machine) -> None:
    machine.process("4:memory:/job", "1:cpu:/job", "0::/user.slice")
    machine.group("unified").group("unified/user.slice").group("cpu").group("memory")
    machine.group("memory/job", memory_limit_in_bytes=f"{2 * GIB}", memory_usage_in_bytes=f"{GIB}")
    machine.group("cpu/job", cpu_cfs_quota_us="150000", cpu_cfs_period_us="100000")
    assert machine.left == machine.of(GIB, "memory/job/memory.limit_in_bytes")
    assert machine.cores == 1.5
    machine.process("1:name=systemd:/", "0::/user.slice")
    machine.group("unified/user.slice", memory_max=f"{3 * GIB}", memory_current=f"{GIB}")
    assert machine.left == machine.of(2 * GIB, "unified/user.slice/memory.max"), "the controllers may be there"


@pytest.mark.parametrize("path", ["/", "/docker/8f3a", "/../../system.slice/docker-8f3a.scope"])
def test_a_container_that_sees_its_own_group_alone(machine: Machine, path: str) -> None:
    machine.process(f"0::{path}")
    machine.group("", memory_max=f"{2 * GIB}", memory_current=f"{GIB}", cpu_max="50000 100000")
    assert machine.left == machine.of(GIB, "memory.max")
    assert machine.cores == 0.5
    machine.process(f"4:memory:{path}").group("memory")
    machine.group("memory", memory_limit_in_bytes=f"{5 * GIB}", memory_usage_in_bytes=f"{GIB}")
    assert machine.left == machine.of(4 * GIB, "memory/memory.limit_in_bytes")


def test_no_limits(machine: Machine) -> None:
    assert (machine.left, machine.cores) == (None, None), "nothing is mounted"
    machine.process("0::/job").group("")
    assert (machine.left, machine.cores) == (None, None), "nothing is said"
    machine.group("job", memory_max="max", memory_high="max", memory_current=f"{GIB}", cpu_max="max 100000")
    assert (machine.left, machine.cores) == (None, None), "no limit is set"
    machine.own.unlink()
    assert (machine.left, machine.cores) == (None, None), "no list of groups"


@pytest.mark.parametrize("text", ["", "many", "-5", "1 2 3", "0x10", "\x00", "9" * 5000])
def test_what_nobody_understands_limits_nothing(machine: Machine, text: str) -> None:
    machine.process("0::/job", "nonsense", ":::", "0:", "7:memory").group("")
    machine.group("job", memory_max=text, memory_high=text, memory_current=f"{GIB}", cpu_max=text)
    machine.group("job", cpu_cfs_quota_us=text, cpu_cfs_period_us=text)
    assert (machine.left, machine.cores) == (None, None)
    (machine.folder / "job" / "memory.max").write_bytes(b"\xff\xfe")
    machine.group("job", cpu_max="100000 0")
    assert (machine.left, machine.cores) == (None, None)
    machine.group("job", memory_max=f"{2 * GIB}", memory_stat=f"inactive_file {text}\nalone")
    assert machine.left == machine.of(GIB, "job/memory.max"), "without its page cache"


def test_a_group_that_is_over_its_limit_gives_nothing(machine: Machine) -> None:
    machine.process("0::/job").group("").group("job", memory_max=f"{GIB}", memory_current=f"{2 * GIB}")
    assert machine.left == machine.of(0, "job/memory.max")
