"""A machine: the figures that a step's time and memory follow from, and where each is from. A value, and a file.

    {"penstock": "machine", "version": 1, "name": "...", "device": "cuda", "probed": false, "fingerprint": {...},
     "figures": {"disk_read": {"value": 7e9, "low": 6.8e9, "high": 7.1e9, "how": "..."}, "disk_write": 5e9, ...}}

People write such files by hand, and they may be anybody's: what is wrong with one is a `ConfigError` of one line.

A file may name a GPU and a host of `machines/gpus` and `machines/hosts` instead, which have data sheets' numbers:

    {"penstock": "machine", "version": 1, "name": "...", "what": "...", "gpu": "rtx4090", "gpus": 1,
     "host": "ryzen-7950x", "figures": {"disk_read": 6e9}}
"""

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

from penstock.errors import ConfigError, one_line, shown
from penstock.files import Field, check_fields, plain, read_file, read_record, reader, write_whole
from penstock.planner.formatting import aligned
from penstock.planner.rates import (
    RATES,
    STATED,
    Rate,
    check_count,
    check_name,
    number,
    parse_rate,
    write_value,
)

__all__ = ["RATES", "Machine", "Rate", "parse_rate", "shipped", "write_value"]

KIND, VERSION = "machine", 1
FOLDER = Path(__file__).parent / "machines"
_MOST_BYTES = 1 << 20
_MOST_CHARS = 200
#: Figures of an accelerator that differ little between those of its kind.
_NARROW = frozenset(
    {"flops_bfloat16", "flops_float16", "device_bandwidth", "device_update", "op_seconds", "h2d", "d2h", "duplex"}
)
#: How many times less or more a narrow figure may be: than that of the same accelerator, than those of the same kind of
#: device, and what any figure may be.
_OF_THE_SAME, _OF_ITS_KIND, _OF_ANY = 5.0, 50.0, 1e4

Triple = tuple[float, float, float]
#: What is reached of a peak: value, low and high, all of them assumed. Of a kind of GPU: products in float32, products
#: in bfloat16 and float16, elementwise operations, and updates.
GPU_SHARES: Mapping[str, tuple[Triple, Triple, Triple, Triple]] = {
    "rtx30": ((0.7, 0.55, 0.85), (0.85, 0.7, 0.95), (0.88, 0.8, 0.93), (0.83, 0.7, 0.93)),
    "rtx40": ((0.7, 0.55, 0.85), (0.88, 0.75, 0.98), (0.9, 0.8, 0.94), (0.85, 0.7, 0.94)),
    "rtx50": ((0.65, 0.5, 0.8), (0.88, 0.75, 1.0), (0.87, 0.78, 0.93), (0.82, 0.68, 0.93)),
    "rtx-pro": ((0.65, 0.5, 0.8), (0.75, 0.55, 0.95), (0.87, 0.78, 0.93), (0.82, 0.68, 0.93)),
    "l40s": ((0.6, 0.45, 0.8), (0.6, 0.45, 0.8), (0.83, 0.72, 0.9), (0.78, 0.62, 0.9)),
    "a100": ((0.9, 0.75, 0.97), (0.75, 0.6, 0.87), (0.85, 0.75, 0.92), (0.8, 0.65, 0.92)),
    "h100": ((0.75, 0.6, 0.9), (0.65, 0.5, 0.8), (0.85, 0.75, 0.93), (0.8, 0.65, 0.93)),
    "h200": ((0.75, 0.6, 0.9), (0.68, 0.5, 0.8), (0.85, 0.75, 0.93), (0.8, 0.65, 0.93)),
    "mi300x": ((0.6, 0.4, 0.8), (0.5, 0.35, 0.7), (0.78, 0.6, 0.88), (0.74, 0.55, 0.88)),
    "gb10": ((0.65, 0.5, 0.85), (0.65, 0.4, 0.85), (0.82, 0.7, 0.92), (0.78, 0.6, 0.92)),
}
#: Of a link to the host: from and to pinned memory, from and to pageable memory, and both ways at once. On a server two
#: devices may copy at once through one switch.
LINK_SHARES: Mapping[str, tuple[Triple, Triple, Triple, Triple]] = {
    "desktop, PCI Express 4.0": ((0.8, 0.7, 0.88), (0.82, 0.7, 0.88), (0.4, 0.2, 0.6), (0.7, 0.68, 0.85)),
    "desktop, PCI Express 5.0": ((0.8, 0.7, 0.88), (0.82, 0.7, 0.88), (0.25, 0.12, 0.4), (0.7, 0.68, 0.85)),
    "PCI Express 3.0": ((0.8, 0.4, 0.88), (0.82, 0.4, 0.88), (0.4, 0.2, 0.6), (0.7, 0.38, 0.85)),
    "PCI Express 4.0": ((0.8, 0.4, 0.88), (0.82, 0.4, 0.88), (0.35, 0.15, 0.5), (0.7, 0.38, 0.85)),
    "PCI Express 5.0": ((0.8, 0.4, 0.88), (0.82, 0.4, 0.88), (0.2, 0.1, 0.35), (0.7, 0.38, 0.85)),
    "NVLink-C2C": ((0.8, 0.65, 0.88), (0.65, 0.5, 0.8), (0.2, 0.05, 0.6), (0.5, 0.4, 0.6)),
    "one memory": ((0.75, 0.5, 0.9), (0.75, 0.5, 0.9), (0.6, 0.3, 0.9), (0.42, 0.38, 0.46)),
}
#: Of links between GPUs: of the peak one way, and the seconds of a small collective.
PEER_SHARES: Mapping[str, tuple[Triple, Triple]] = {
    "NVLink 3": ((0.75, 0.6, 0.82), (2.5e-5, 1.5e-5, 6e-5)),
    "NVLink 4": ((0.78, 0.6, 0.85), (2e-5, 1.2e-5, 6e-5)),
    "NVLink 4 of 4 GPUs": ((0.7, 0.5, 0.82), (2.5e-5, 1.5e-5, 6e-5)),
    "NVLink 5": ((0.75, 0.55, 0.85), (2e-5, 1.2e-5, 6e-5)),
    "Infinity Fabric": ((0.7, 0.5, 0.82), (3e-5, 1.5e-5, 8e-5)),
    "PCI Express": ((0.65, 0.35, 0.8), (4e-5, 2.5e-5, 1e-4)),
}
#: Of a kind of host: what is reached of its memory's peak, what updates reach of it, and seconds of an eager dispatch.
HOST_SHARES: Mapping[str, tuple[Triple, Triple, Triple]] = {
    "desktop": ((0.75, 0.6, 0.85), (0.7, 0.5, 0.85), (5e-6, 3e-6, 1e-5)),
    "desktop-ddr4": ((0.8, 0.65, 0.9), (0.75, 0.55, 0.9), (5e-6, 3e-6, 1e-5)),
    "server": ((0.75, 0.55, 0.85), (0.7, 0.45, 0.85), (8e-6, 4e-6, 1.5e-5)),
    "grace": ((0.8, 0.65, 0.9), (0.75, 0.55, 0.9), (8e-6, 4e-6, 1.5e-5)),
}
READ_SHARE, NET_SHARE, NET_SECONDS = (0.9, 0.7, 1.0), (0.8, 0.6, 0.92), (4e-5, 2.5e-5, 1e-4)
#: Seconds of what no data sheet has: value, low and high.
ASSUMED: Mapping[str, tuple[Triple, str]] = {
    "op_seconds": ((3e-6, 2e-6, 6e-6), "what a kernel without work takes on a device of 2020 or later"),
    "job_seconds": ((2e-5, 1e-5, 5e-5), "a submission from Python, an event and a copy that is enqueued"),
    "wake_seconds": ((3e-4, 1e-4, 7e-4), "an event, a thread that wakes up, and its turn at the interpreter"),
    "disk_seconds": ((1e-4, 6e-5, 3e-4), "what NAND flash takes for a read, with the system's part"),
}
_GIB, _CONTEXT = 1 << 30, 1 << 29


def _name(field: Field) -> str:
    if not 0 < len(field.string()) <= _MOST_CHARS:
        raise field.refuse(f"a text of 1 to {_MOST_CHARS} characters")
    return field.string()


def _device(field: Field) -> str:
    if not (field.string().isascii() and field.string().isidentifier()):
        raise field.refuse("a kind of device: cuda, or cpu")
    return field.string()


def _figures(field: Field) -> dict[str, Rate]:
    """Read figures by name, in the order of the table, so that files of two machines are read beside each other."""
    found = {check_name(name): _figure(item) for name, item in field.entries()}
    for name, rate in found.items():
        try:
            check_count(name, rate.value)
        except ConfigError as error:
            raise ConfigError(f"{error}. Write one.") from error
    return {name: found[name] for name in RATES if name in found}


def _figure(field: Field) -> Rate:
    """Read a figure: an object, or a number alone."""
    if isinstance(field.value, Rate):
        return field.value
    given = field.value if isinstance(field.value, Mapping) else {"value": field.number()}
    if "value" in given:
        given = {"low": given["value"], "high": given["value"], "how": STATED, **given}
    try:
        return reader(Rate)(Field(None, field.path, given))
    except ConfigError as error:
        raise error if field.path in str(error) else field.fail(f"is no figure: {error}") from error


@dataclass(frozen=True)
class Machine:
    """A machine: its figures by name, as measured, stated, or taken from data sheets.

    Arguments:
        name: what it is called.
        device: the kind of its devices, as torch calls it: "cuda", or "cpu" where there is no accelerator.
        figures: by their names in `RATES`, in SI units. One that is not there is missed by what needs it alone.
        fingerprint: what the machine is made of, such as the names of its device and processor: JSON values.
        probed: whether its figures were measured on it.
        unified_memory: True if device and host are one memory; `host_memory` is its size.

    Raises:
        ConfigError: there is no such figure, a figure can not have its value, or the fingerprint is no JSON.

    Example:
        >>> machine = Machine.read("rtx4090-desktop").replace(disk_read=14e9)
        >>> machine.value("disk_read")
        14000000000.0
    """

    name: Annotated[str, _name]
    device: Annotated[str, _device]
    figures: Annotated[Mapping[str, Rate], _figures]
    fingerprint: Annotated[Mapping[str, Any], plain] = field(default_factory=dict)
    probed: bool = False
    unified_memory: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def probe(cls, *, folders: Sequence[str | PathLike[str]] = (), seconds: float = 60) -> "Machine":
        """Measure this machine.

        Arguments:
            folders: where files of the nvme tier would be; what disks do is measured there. None: no figures of disks.
            seconds: how long it may take.

        Returns:
            The machine, with the figures that were measured.

        Raises:
            ConfigError: `seconds` is no time or too short, a folder cannot be written or is full, or a figure cannot be
                one of this machine.

        Example:
            >>> Machine.probe(folders=["/mnt/nvme"]).write("machine.json")  # doctest: +SKIP
        """
        from penstock.probe.measure import measure  # with torch and the native module, which files need not wait for

        return from_probe(*measure(folders=list(folders), seconds=seconds))

    @classmethod
    def read(cls, path_or_name: str | PathLike[str]) -> "Machine":
        """Read a machine that somebody wrote down, or one of those that come with the package.

        Arguments:
            path_or_name: a file, or the name of a machine that comes with the package, as `shipped()` lists them.

        Raises:
            ConfigError: there is no such file or name, or the file is not a machine's. The message says what is wrong.

        Example:
            >>> Machine.read("h100-node").device
            'cuda'
        """
        given = os.fspath(path_or_name)
        if not isinstance(given, str):
            raise ConfigError(f"{shown(given)} is no path of a machine's file. Use a text.")
        # A path object is a file, always; a text is a name first: what a folder happens to hold does not change it.
        if given is path_or_name and given in shipped():
            return read_file(FOLDER / f"{given}.json", _MOST_BYTES, _parse)
        is_path = "/" in given or given.endswith(".json") or "\0" in given or not given
        if given is path_or_name and not is_path and not os.path.lexists(given):
            raise _unknown("machine", given, shipped())
        return read_file(given, _MOST_BYTES, _parse)

    def write(self, path: str | PathLike[str]) -> None:
        """Write the machine into a JSON file, which `read` reads and people can edit.

        Arguments:
            path: the file. One that was there is replaced as a whole, or stays as it was.

        Raises:
            ConfigError: it cannot be written.

        Example:
            >>> Machine.read("h100-node").write("ours.json")  # doctest: +SKIP
        """
        content = {key: value for key, value in self.to_dict().items() if key != "figures"}
        rows = [f"  {json.dumps(name)}: {json.dumps(asdict(rate))}" for name, rate in self.figures.items()]
        # A line for each figure, which people can edit.
        text = json.dumps(content, indent=1, allow_nan=False).removesuffix("\n}")
        text += ',\n "figures": {\n' + ",\n".join(rows) + "\n }\n}\n"
        try:
            if len(text) > _MOST_BYTES:
                raise ValueError(f"it would have {len(text):,} bytes, more than are read")
            write_whole(Path(path), text)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
            raise ConfigError(f"{one_line(str(path))} cannot be written: {why}. Name another file.") from error

    def to_dict(self) -> dict[str, Any]:
        """Return what its file holds, as JSON-like values."""
        return {"penstock": KIND, "version": VERSION, **asdict(self)}

    def replace(self, **figures: float) -> "Machine":
        """Make a machine that differs in some figures, to ask what if.

        Arguments:
            figures: new values by name, in the units of `RATES`. They are marked as stated.

        Raises:
            ConfigError: there is no such figure, or a value is no finite number above 0.

        Example:
            >>> Machine.read("h100-node").replace(disk_read=14e9).figures["disk_read"].how
            'stated'
        """
        stated = {}
        for name, value in figures.items():
            check_name(name)
            try:
                stated[name] = Rate.stated(number(value, name))
                check_count(name, stated[name].value)
            except ConfigError as error:
                raise ConfigError(f"{error}. Give it in {RATES[name].unit}.") from error
        return replace(self, figures={**self.figures, **stated})

    def has(self, name: str) -> bool:
        """Return True if the machine has a figure. Any name may be asked for, as of the update by some rule.

        Example:
            >>> Machine.read("cpu-laptop").has("h2d")
            False
        """
        return name in self.figures

    def value(self, name: str) -> float:
        """Look up a figure, in its unit.

        Raises:
            ConfigError: the machine lacks it, or there is no figure of that name. The message says what to do.

        Example:
            >>> Machine.read("h100-node").value("devices")
            8.0
        """
        check_name(name)
        if name not in self.figures:
            about = RATES[name]
            of_disks = name.startswith("disk_") or name == "folders"
            raise ConfigError(
                f"The machine {shown(self.name)} has no figure {name} ({about.unit}: {about.meaning}). "
                f"{'Name folders when the machine is probed' if of_disks else 'Probe the machine'}, or state it: "
                f"{name}=NUMBER."
            )
        return self.figures[name].value

    def __str__(self) -> str:
        """Write the figures as a table: name, value, spread, and how each was found."""
        rows = [["figure", "value", "from", "to", "how"]]
        for name, rate in self.figures.items():
            ends = ["", ""] if rate.low == rate.high else [write_value(name, end) for end in (rate.low, rate.high)]
            rows.append([name, write_value(name, rate.value), *ends, one_line(rate.how)])
        how_known = "probed" if self.probed else "not probed"
        return "\n".join([f"{one_line(self.name)} ({self.device}, {how_known})", *aligned(rows)])


@dataclass(frozen=True)
class _Parts:
    """A file that names a GPU and a host; its figures replace theirs."""

    name: str
    what: str
    gpu: str
    host: str
    gpus: int = 1
    figures: Annotated[Mapping[str, Rate], _figures] = field(default_factory=dict)


def gpus() -> list[dict[str, Any]]:
    """Read the files of GPUs: names as torch has them, and numbers of data sheets in SI units.

    `match` is a regular expression that finds the names of this GPU and of no other. `float32` is the dense peak
    without TF32, `bfloat16` and `float16` are those with sums in float32: 0 if it has no such units.
    """
    return [json.loads(path.read_text()) for path in sorted((FOLDER / "gpus").glob("*.json"))]


def _part(folder: str, name: str) -> dict[str, Any]:
    """Read the file of a GPU or of a host."""
    names = sorted(path.stem for path in (FOLDER / folder).glob("*.json"))
    if name not in names:
        raise _unknown(folder.removesuffix("s"), name, names)
    part: dict[str, Any] = json.loads((FOLDER / folder / f"{name}.json").read_text())
    return part


def _assemble(parts: _Parts) -> Machine:
    """Make a machine of a GPU and a host."""
    gpu, host = _part("gpus", parts.gpu), _part("hosts", parts.host)
    disk, is_one = host["disk"], gpu.get("unified_memory", False)
    memory = f"{host['memory_gib']:,} GiB of {host['memory']}"
    shown_mib = f"{gpu['memory']}, of which a driver shows {gpu['memory_mib']:,} MiB"
    host_memory = (int(0.95 * host["memory_gib"] * _GIB), f"0.95 of {memory}; the rest is taken to be the system's")
    context = "less 0.5 GiB that a process's context is assumed to take"
    device_memory = ((gpu["memory_mib"] << 20) - _CONTEXT, f"{shown_mib}, {context}; {gpu['source']}")
    stated = {
        "devices": (parts.gpus, f"{parts.gpus} x {gpu['name']}"),
        "device_memory": host_memory if is_one else device_memory,
        "host_memory": host_memory,
        "pinnable_memory": (int(0.8 * host["memory_gib"] * _GIB), f"0.8 (assumed) of {memory}"),
        "host_threads": (host["cores"], f"{host['cores']} cores: {host['processor']}, {host['cores_source']}"),
        "folders": (host["disks"], f"one for each {disk['name']}, mounted by itself"),
        "disk_free": (disk["free"] * disk["nbytes"], f"{disk['free']} (assumed) of {disk['name']}; {disk['source']}"),
        "disk_endurance": (disk["endurance"], f"{disk['endurance'] / 1e12:,.0f} TB; {disk['source']}"),
    }
    peaks = _peaks(gpu, host)
    assumed = {**ASSUMED, "op_host_seconds": (HOST_SHARES[host["kind"]][2], "PyTorch's eager dispatch of an operation")}
    if parts.gpus > 1:
        peers, speed = gpu.get("peers", "PCI Express"), gpu.get("peers_bandwidth", gpu["link_bandwidth"])
        share, latency = PEER_SHARES[peers]
        peaks["link_bandwidth"] = (share, speed, f"the peak of {peers} one way", gpu)
        assumed["link_seconds"] = (latency, "a small collective, with its launch")
    if parts.gpus > 1 and "net" in host:
        row = (NET_SHARE, host["net_bandwidth"], f"the peak of {host['net']} one way", host["net_source"])
        peaks["net_bandwidth"] = row
        assumed["net_seconds"] = (NET_SECONDS, "a small collective between hosts, with its launch")
    figures = {
        **{name: Rate.stated(value, how) for name, (value, how) in stated.items()},
        **{name: _of(name, *row) for name, row in peaks.items() if row[1]},
        **{name: Rate(*values, f"assumed: {how}") for name, (values, how) in assumed.items()},
    }
    read, write = figures["disk_read"].value, figures["disk_write"].value
    mixed = float(f"{2 / (1 / read + 1 / write):.4g}")
    how = "derived: half of the bytes at disk_read, half at disk_write; from 0.7 of it to what is read alone"
    figures["disk_mixed"] = Rate(mixed, float(f"{0.7 * mixed:.4g}"), read, how)
    fingerprint = {
        "what": parts.what,
        "accelerator": f"{parts.gpus} x {gpu['name']}",
        "processor": host["processor"],
        "memory": host["memory"],
        "disks": f"{host['disks']} x {disk['name']}",
    }
    return Machine(parts.name, "cuda", {**figures, **parts.figures}, fingerprint, unified_memory=is_one)


def _peaks(gpu: Mapping[str, Any], host: Mapping[str, Any]) -> dict[str, tuple[Triple, float, str, Any]]:
    """List the figures that are a share of a peak: the share, the peak, what it is of, and its source."""
    full, half, elementwise, on_device = GPU_SHARES[gpu["kind"]]
    memory, on_host, _ = HOST_SHARES[host["kind"]]
    disk, link, speed = host["disk"], gpu["link"], gpu["link_bandwidth"]
    up, down, pageable, both = LINK_SHARES.get(f"{host['kind'].split('-')[0]}, {link}") or LINK_SHARES[link]
    found: dict[str, tuple[Triple, float, str, Any]] = {
        "flops_float32": (full, gpu["float32"], "the peak of fp32 without TF32, torch's default", gpu),
        "flops_bfloat16": (half, gpu["bfloat16"], "the dense bf16 peak with sums in fp32", gpu),
        "flops_float16": (half, gpu["float16"], "the dense fp16 peak with sums in fp32", gpu),
        "device_bandwidth": (elementwise, gpu["bandwidth"], "the memory's peak", gpu),
        "device_update": (on_device, gpu["bandwidth"], "the memory's peak", gpu),
        "duplex": (both, 2 * speed, f"the peak of {link} both ways", gpu),
        "host_bandwidth": (memory, host["bandwidth"], f"the peak of {host['memory']}", host["bandwidth_source"]),
        "update": (on_host, host["bandwidth"], f"the peak of {host['memory']}", host["bandwidth_source"]),
        "disk_read": (READ_SHARE, disk["read"], "the sequential peak", disk),
        "disk_write": (tuple(disk["steady"]), disk["write"], "the sequential peak, of what is written for hours", disk),
    }
    for name, share in (("h2d", up), ("d2h", down), ("h2d_pageable", pageable), ("d2h_pageable", pageable)):
        found[name] = (share, speed, f"the peak of {link} one way", gpu)
    return found


def _of(name: str, share: Triple, peak: float, what: str, source: Any) -> Rate:
    """Make the figure of a peak: to four digits, as sure as the share of it is."""
    said = source if isinstance(source, str) else source["source"]
    value, low, high = (float(f"{peak * part:.4g}") for part in share)
    of = write_value(name, peak)
    return Rate(value, low, high, f"{share[0]:g} (from {share[1]:g} to {share[2]:g}, assumed) of {of}, {what}; {said}")


def shipped() -> list[str]:
    """List the names of the machines that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def from_probe(
    name: str, device: str, measured: Mapping[str, Sequence[Any]], fingerprint: Mapping[str, Any]
) -> Machine:
    """Make a machine of measurements, each held against what machines like it have.

    Arguments:
        name: what it is called.
        device: the kind of its devices.
        measured: by name, value, lower quartile, upper quartile, and how it was measured. One that is implausible is
            replaced by the figure of the same accelerator's data sheet, where that is known, and `how` says so.
        fingerprint: what the machine is made of.

    Raises:
        ConfigError: a figure is implausible, and no data sheet has it.
    """
    machines = [Machine.read(each) for each in shipped()]
    accelerator = str(fingerprint.get("device_name"))
    same = [each for each in machines if str(each.fingerprint.get("accelerator")).endswith(f" x {accelerator}")]
    like = [each for each in machines if each.device == device != "cpu" and not each.unified_memory]
    figures = {each: _plausible(each, values, same, like, machines) for each, values in measured.items()}
    return Machine(name, device, figures, fingerprint, probed=True)


def _plausible(name: str, values: Sequence[Any], *circles: Sequence[Machine]) -> Rate:
    """Return a measured figure, or that of a data sheet where it is outside of what machines like this one have.

    Arguments:
        name: the figure's.
        values: as they were measured.
        circles: machines with the same accelerator, of the same kind of device, and any.
    """
    value, least, _, _ = values
    unit = RATES[name].unit
    same, like, every = ([each.figures[name] for each in circle if each.has(name)] for circle in circles)
    narrow = name in _NARROW
    known, factor = (
        (same, _OF_THE_SAME) if narrow and same else (like, _OF_ITS_KIND) if narrow and like else (every, _OF_ANY)
    )
    if unit not in ("bytes/s", "FLOP/s", "s") or not known:  # of what no machine that comes along has
        return Rate(*values)
    low, high = min(each.low for each in known) / factor, max(each.high for each in known) * factor
    if low <= value <= high and least > 0:
        return Rate(*values)
    found = (
        f"{name} was measured as {value:.3g} {unit}, its lower quartile as {least:.3g}; "
        f"machines like this one have {low:.3g} to {high:.3g}"
    )
    sheets = [*same, *(each for each in like if each.how.startswith("assumed"))]
    if sheets:
        return replace(sheets[0], how=f"not measured: {sheets[0].how}. {found}")
    raise ConfigError(
        f"The probe cannot be right: {found}. Probe again with nothing else running and for longer (seconds=120), or "
        "write the machine's file by hand (docs/machines.md)."
    )


def _parse(raw: bytes) -> Machine:
    """Make a machine of the content of its file."""
    content = Field(None, "", read_record(raw, KIND, VERSION))
    return _assemble(reader(_Parts)(content)) if "gpu" in content else reader(Machine)(content)


def _unknown(what: str, given: str, names: Sequence[str]) -> ConfigError:
    """Make the error of a name that nothing has; the caller raises it."""
    near = difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.4) if len(given) <= 99 else []
    hint = f" Did you mean {near[0]}?" if near else ""
    return ConfigError(
        f"There is no {what} {shown(given)}, and no such file.{hint} Those that come along: {', '.join(names)}."
    )
