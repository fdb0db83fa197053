"""A machine as a value: the figures that a step's time and memory follow from, and where each figure is from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

from penstock.errors import ConfigError, one_line, shown
from penstock.files import Field, plain
from penstock.planner import machine_files
from penstock.planner.machine_files import shipped
from penstock.planner.rates import (
    RATES,
    Rate,
    check_count,
    check_name,
    number,
    parse_rate,
    write_value,
)

__all__ = ["RATES", "Machine", "Rate", "parse_rate", "shipped", "write_value"]

_MOST_CHARS = 200
#: Figures of an accelerator that differ little between those of its kind.
_NARROW = frozenset({"device_bandwidth", "device_update", "op_seconds", "h2d", "d2h", "duplex"})
#: How many times less or more a narrow figure may be: than that of the same accelerator, than those of the same kind of
#: device, and what any figure may be.
_OF_THE_SAME, _OF_ITS_KIND, _OF_ANY = 5.0, 50.0, 1e4


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

    name: str
    device: str
    figures: Mapping[str, Annotated[Rate, machine_files.figure]]
    fingerprint: Annotated[Mapping[str, Any], plain] = field(default_factory=dict)
    probed: bool = False
    unified_memory: bool = False

    def __post_init__(self) -> None:
        _check(self.name, self.device, self.probed, self.unified_memory)
        for name, figure in self.figures.items():
            check_name(name)
            try:
                check_count(name, figure.value)
            except ConfigError as error:
                raise ConfigError(f"{error}. Write one.") from error
        # In the order of the table, so that files and tables of two machines are read beside each other.
        ordered = {name: self.figures[name] for name in RATES if name in self.figures}
        object.__setattr__(self, "figures", ordered)
        object.__setattr__(self, "fingerprint", plain(Field(None, "fingerprint", self.fingerprint)))

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
        return machine_files.read(path_or_name, cls)

    def write(self, path: str | PathLike[str]) -> None:
        """Write the machine into a JSON file, which `read` reads and people can edit.

        Arguments:
            path: the file. One that was there is replaced as a whole, or stays as it was.

        Raises:
            ConfigError: it cannot be written.

        Example:
            >>> Machine.read("h100-node").write("ours.json")  # doctest: +SKIP
        """
        machine_files.write(Path(path), self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Give what its file holds, as JSON-like values."""
        parts = {name: getattr(self, name) for name in ("name", "device", "probed", "unified_memory", "fingerprint")}
        return machine_files.content(parts, self.figures)

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
        """Whether the machine has a figure. Any name may be asked for, as of the update by some rule.

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
            raise ConfigError(
                f"The machine {shown(self.name)} has no figure {name} ({about.unit}: {about.meaning}). {_remedy(name)}"
            )
        return self.figures[name].value

    def __str__(self) -> str:
        """Write the figures as a table: name, value, spread, and how each was found."""
        rows = [("figure", "value", "from", "to", "how")]
        for name, figure in self.figures.items():
            low, high = (
                ("", "")
                if figure.low == figure.high
                else (write_value(name, figure.low), write_value(name, figure.high))
            )
            rows.append((name, write_value(name, figure.value), low, high, one_line(figure.how)))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = []
        for name, *numbers, how in rows:
            cells = [name.ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
            lines.append("  ".join([*cells, how]).rstrip())
        how_known = "probed" if self.probed else "not probed"
        return "\n".join([f"{one_line(self.name)} ({self.device}, {how_known})", *lines])


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
    like = [each for each in machines if each.device == device and device != "cpu"]
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
    if unit not in ("bytes/s", "FLOP/s", "s"):
        return Rate(*values)
    like = [[each.figures[name] for each in circle if each.has(name)] for circle in circles]
    factors = (_OF_THE_SAME, _OF_ITS_KIND, _OF_ANY)
    which = next((n for n, known in enumerate(like) if known and (name in _NARROW or n == 2)), None)
    if which is None:  # of what no machine that comes along has
        return Rate(*values)
    low = min(each.low for each in like[which]) / factors[which]
    high = max(each.high for each in like[which]) * factors[which]
    if low <= value <= high and least > 0:
        return Rate(*values)
    found = (
        f"{name} was measured as {value:.3g} {unit}, its lower quartile as {least:.3g}; "
        f"machines like this one have {low:.3g} to {high:.3g}"
    )
    sheets = [*like[0], *(each for each in like[1] if each.how.startswith("assumed"))]
    if sheets:
        return replace(sheets[0], how=f"not measured: {sheets[0].how}. {found}")
    raise ConfigError(
        f"The probe cannot be right: {found}. Probe again with nothing else running and for longer (seconds=120), or "
        "write the machine's file by hand (docs/machines.md)."
    )


def _check(name: object, device: object, probed: object, unified_memory: object) -> None:
    """Check what a file may have anything for."""
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_CHARS:
        raise ConfigError(f"A machine's name is {shown(name)}. Use a text of 1 to {_MOST_CHARS} characters.")
    if not isinstance(device, str) or not (device.isascii() and device.isidentifier()):
        raise ConfigError(f"A machine's device is {shown(device)}. Use a kind of device: cuda, or cpu.")
    for what, value in (("probed", probed), ("unified_memory", unified_memory)):
        if not isinstance(value, bool):
            raise ConfigError(f"A machine's {what} is {shown(value)}. Use true or false.")


def _remedy(name: str) -> str:
    """Say what to do where a figure is missed."""
    if name.startswith("disk_") or name == "folders":
        return f"Name folders when the machine is probed, or state it: {name}=NUMBER."
    return f"Probe the machine, or state it: {name}=NUMBER."
