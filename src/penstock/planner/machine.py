"""A machine: the figures that a step's time and memory follow from, and where each is from. A value, and a file.

    {"penstock": "machine", "version": 1, "name": "...", "device": "cuda", "probed": false, "fingerprint": {...},
     "figures": {"disk_read": {"value": 7e9, "low": 6.8e9, "high": 7.1e9, "how": "..."}, "disk_write": 5e9, ...}}

People write such files by hand, and they may be anybody's: what is wrong with one is a `ConfigError` of one line.

A file may name a GPU and a host of `machines/gpus` and `machines/hosts` instead, which have data sheets' numbers:

    {"penstock": "machine", "version": 1, "name": "...", "what": "...", "gpu": "rtx4090", "gpus": 1,
     "host": "ryzen-7950x", "figures": {"disk_read": 6e9}}
"""

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
from penstock.planner.rates import RATES, STATED, Rate, check_name, check_value, unknown, write_value

KIND, VERSION = "machine", 1
FOLDER = Path(__file__).parent / "machines"
#: Peaks by figure, as keys of the files of GPUs, hosts and disks; what share of them is assumed to be reached, and the
#: seconds that no data sheet has: value, low and high of each, and what the seconds are of.
SHARES = Path(__file__).with_name("shares.json")
_MOST_BYTES = 1 << 20
_MOST_CHARS = 200
#: Figures of an accelerator that differ little between those of its kind.
_NARROW = frozenset(
    {"flops_bfloat16", "flops_float16", "device_bandwidth", "device_update", "op_seconds", "h2d", "d2h", "duplex"}
)
#: How many times less or more a narrow figure may be: than that of the same accelerator, than those of the same kind of
#: device, and what any figure may be.
_OF_THE_SAME, _OF_ITS_KIND, _OF_ANY = 5.0, 50.0, 1e4
_GIB, _CONTEXT = 1 << 30, 1 << 29

Triple = tuple[float, float, float]


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
        check_value(name, rate.value)
    return {name: found[name] for name in RATES if name in found}


def _figure(field: Field) -> Rate:
    """Read a figure: an object, or a number alone."""
    if isinstance(field.value, Rate):
        return field.value
    given = field.value if isinstance(field.value, Mapping) else {"value": field.number()}
    if "value" in given:
        given = {**dict.fromkeys(("value", "low", "high"), given["value"]), "how": STATED, **given}
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
            raise unknown("machine or file", given, shipped())
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
        stated = {name: Rate.stated(check_value(check_name(name), value)) for name, value in figures.items()}
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
        raise unknown(folder.removesuffix("s"), name, names)
    part: dict[str, Any] = json.loads((FOLDER / folder / f"{name}.json").read_text())
    return part


def _assemble(parts: _Parts) -> Machine:
    """Make a machine of a GPU and a host."""
    gpu, host = _part("gpus", parts.gpu), _part("hosts", parts.host)
    gpu = {"peers": "PCI Express", "peers_bandwidth": gpu["link_bandwidth"], "unified_memory": False, **gpu}
    table = json.loads(SHARES.read_text())
    shares = _shares(table, gpu, host, parts.gpus)
    figures = {
        **_sizes(gpu, host, parts.gpus),
        **_peaks(table, shares, {"gpu": gpu, "host": host, "disk": host["disk"]}),
        **{name: Rate(*shares[name], f"assumed: {how}") for name, how in table["seconds"].items() if name in shares},
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
        "disks": f"{host['disks']} x {host['disk']['name']}",
    }
    figures |= parts.figures
    return Machine(parts.name, "cuda", figures, fingerprint, unified_memory=gpu["unified_memory"])


def _shares(table: Mapping[str, Any], gpu: Mapping[str, Any], host: Mapping[str, Any], gpus: int) -> dict[str, Triple]:
    """Choose the shares of peaks, and the seconds, that a GPU and a host of their kinds are assumed to reach."""
    link = f"{host['kind'].split('-')[0]}, {gpu['link']}"
    found = {**table["any"], **table["gpus"][gpu["kind"]], **table["hosts"][host["kind"]]}
    found |= {**(table["links"].get(link) or table["links"][gpu["link"]]), "disk_write": host["disk"]["steady"]}
    if gpus > 1:
        found |= table["peers"][gpu["peers"]] | (table["net"] if "net" in host else {})
    return found


def _sizes(gpu: Mapping[str, Any], host: Mapping[str, Any], gpus: int) -> dict[str, Rate]:
    """List the figures that are bytes and counts."""
    disk, memory = host["disk"], f"{host['memory_gib']:,} GiB of {host['memory']}"
    shown_mib = f"{gpu['memory']}, of which a driver shows {gpu['memory_mib']:,} MiB"
    host_memory = (int(0.95 * host["memory_gib"] * _GIB), f"0.95 of {memory}; the rest is taken to be the system's")
    context = "less 0.5 GiB that a process's context is assumed to take"
    device_memory = ((gpu["memory_mib"] << 20) - _CONTEXT, f"{shown_mib}, {context}; {gpu['source']}")
    rows = {
        "devices": (gpus, f"{gpus} x {gpu['name']}"),
        "device_memory": host_memory if gpu["unified_memory"] else device_memory,
        "host_memory": host_memory,
        "pinnable_memory": (int(0.8 * host["memory_gib"] * _GIB), f"0.8 (assumed) of {memory}"),
        "host_threads": (host["cores"], f"{host['cores']} cores: {host['processor']}, {host['cores_source']}"),
        "folders": (host["disks"], f"one for each {disk['name']}, mounted by itself"),
        "disk_free": (disk["free"] * disk["nbytes"], f"{disk['free']} (assumed) of {disk['name']}; {disk['source']}"),
        "disk_endurance": (disk["endurance"], f"{disk['endurance'] / 1e12:,.0f} TB; {disk['source']}"),
    }
    return {name: Rate.stated(*row) for name, row in rows.items()}


def _peaks(table: Mapping[str, Any], shares: Mapping[str, Triple], parts: Mapping[str, Any]) -> dict[str, Rate]:
    """Make the figures that are a share of a peak: to four digits, as sure as the share of it is."""
    found = {}
    for name, (of, key, what, times) in table["peaks"].items():
        part = parts[of]
        if name not in shares or not part[key]:
            continue
        value, low, high = (float(f"{times * part[key] * share:.4g}") for share in shares[name])
        share = "{:g} (from {:g} to {:g}, assumed)".format(*shares[name])
        source = part.get(f"{key}_source") or part["source"]
        peak = f"{write_value(name, times * part[key])}, {what.format(**part)}"
        found[name] = Rate(value, low, high, f"{share} of {peak}; {source}")
    return found


def shipped() -> list[str]:
    """List the names of the machines that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def from_probe(measured: Mapping[str, Rate], fingerprint: Mapping[str, Any]) -> Machine:
    """Make a machine of measurements, each held against what machines like it have.

    Arguments:
        measured: its figures by name. One that is implausible is replaced by the figure of the same accelerator's data
            sheet, where that is known, and `how` says so.
        fingerprint: what the machine is made of, as `penstock.probe.fingerprint` describes it.

    Raises:
        ConfigError: a figure is implausible, and no data sheet has it.
    """
    machines, device = [Machine.read(each) for each in shipped()], fingerprint["device"]
    accelerator = str(fingerprint.get("device_name"))
    same = [each for each in machines if str(each.fingerprint.get("accelerator")).endswith(f" x {accelerator}")]
    like = [each for each in machines if each.device == device != "cpu" and not each.unified_memory]
    figures = {each: _plausible(each, rate, same, like, machines) for each, rate in measured.items()}
    return Machine(machine_name(fingerprint), device, figures, fingerprint, probed=True)


def machine_name(found: Mapping[str, Any]) -> str:
    """Name a machine by its fingerprint: "2 x NVIDIA H100, AMD EPYC 9554"."""
    cpu = f"{found['cpu'][:80]}, {found['cores']} cores"
    if found["device"] == "cpu":
        return cpu
    return f"{found['devices']} x {found['device_name'][:80]}, {cpu}"


def _plausible(name: str, rate: Rate, *circles: Sequence[Machine]) -> Rate:
    """Return a measured figure, or that of a data sheet where it is outside of what machines like this one have.

    Arguments:
        name: the figure's.
        rate: as it was measured.
        circles: machines with the same accelerator, of the same kind of device, and any.
    """
    unit = RATES[name].unit
    same, like, every = ([each.figures[name] for each in circle if each.has(name)] for circle in circles)
    known, factor = every, _OF_ANY
    if name in _NARROW and (same or like):
        known, factor = (same, _OF_THE_SAME) if same else (like, _OF_ITS_KIND)
    if unit in ("bytes", "count") or not known:  # of what no machine that comes along has
        return rate
    low, high = min(each.low for each in known) / factor, max(each.high for each in known) * factor
    if low <= rate.value <= high:
        return rate
    found = f"{name} was measured as {rate.value:.3g} {unit}; machines like this one have {low:.3g} to {high:.3g}"
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
