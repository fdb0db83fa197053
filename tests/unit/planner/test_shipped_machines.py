"""The machines that come along: whole, plausible beside their data sheets, and in docs/machines.md as they are."""

import json
import re
from importlib import resources
from pathlib import Path

import pytest

from penstock import ConfigError
from penstock.planner.machine import RATES, Machine, gpus, shipped, write_value

PAGE = (Path(__file__).parents[3] / "docs" / "machines.md").read_text()
FOLDER = Path(str(resources.files("penstock.planner"))) / "machines"

#: Of a device, as its data sheet has it: memory in bytes, dense bf16 FLOP/s, bytes/s of its memory, bytes/s one way to
#: the host and to other devices (0: none), and how many there are.
SHEETS = {
    "a100-40gb-node": (40 << 30, 312e12, 1555e9, 31.5e9, 300e9, 8),
    "a100-80gb-node": (80 << 30, 312e12, 2039e9, 31.5e9, 300e9, 8),
    "b200-node": (180 << 30, 2250e12, 8000e9, 63e9, 900e9, 8),
    "cpu-laptop": (32 << 30, 1946e9, 89.6e9, 0, 0, 1),
    "dgx-spark": (119 << 30, 125e12, 273e9, 136.5e9, 0, 1),
    "gh200-node": (96 << 30, 989e12, 4000e9, 450e9, 450e9, 4),
    "h100-node": (80 << 30, 989e12, 3350e9, 63e9, 450e9, 8),
    "h100-server": (80 << 30, 989e12, 3350e9, 63e9, 0, 1),
    "h200-node": (141 << 30, 989e12, 4800e9, 63e9, 450e9, 8),
    "l40s-server": (48 << 30, 362e12, 864e9, 31.5e9, 31.5e9, 4),
    "mi300x-node": (192 << 30, 1307.4e12, 5300e9, 63e9, 448e9, 8),
    "rtx-pro-6000-workstation": (96 << 30, 503.8e12, 1792e9, 63e9, 0, 1),
    "rtx3090-desktop": (24 << 30, 71e12, 936e9, 31.5e9, 0, 1),
    "rtx4090-desktop": (24 << 30, 165.2e12, 1008e9, 31.5e9, 0, 1),
    "rtx5090-desktop": (32 << 30, 209.5e12, 1792e9, 63e9, 0, 1),
}
ANY = {
    *("devices", "device_memory", "host_memory", "pinnable_memory", "host_threads"),
    *("flops_float32", "flops_bfloat16", "flops_float16", "device_bandwidth", "device_update"),
    *("op_seconds", "op_host_seconds", "job_seconds", "host_bandwidth", "update"),
    *("folders", "disk_free", "disk_endurance", "disk_read", "disk_write", "disk_mixed", "disk_seconds"),
}
LINKS_OF_AN_ACCELERATOR = {"wake_seconds", "h2d", "d2h", "h2d_pageable", "d2h_pageable", "duplex"}
LINKS_OF_MANY = {"link_bandwidth", "link_seconds", "net_bandwidth", "net_seconds"}

#: How a figure is written down that is a share of a peak, and where peaks are from.
SHARE = re.compile(r"([0-9.]+) \(from ([0-9.]+) to ([0-9.]+), assumed\) of [0-9.]+ [GTP]\w+/s, [^;]+; .+")
SOURCE = re.compile(r"; .* 20[12][0-9]\b|; PCI Express [45].0 specification")
MEASURED = "measured on "  # and the day

each = pytest.mark.parametrize("name", SHEETS)


def test_these_come_along() -> None:
    assert shipped() == sorted(SHEETS)


@each
def test_it_is_whole_called_as_its_file_and_was_not_probed(name: str, tmp_path: Path) -> None:
    machine = Machine.read(name)
    links = LINKS_OF_AN_ACCELERATOR if machine.device != "cpu" else set()
    others = LINKS_OF_MANY if machine.value("devices") > 1 else set()
    assert machine.figures.keys() == ANY | links | others
    assert (machine.name, machine.probed) == (name, False)
    assert machine.device == ("cpu" if name == "cpu-laptop" else "cuda")
    assert machine.unified_memory is (name == "dgx-spark")
    assert {"what", "processor", "memory", "disks"} <= machine.fingerprint.keys()
    machine.write(tmp_path / "machine.json")
    assert Machine.read(tmp_path / "machine.json") == machine


@each
def test_every_figure_says_where_it_is_from(name: str) -> None:
    for figure, value in Machine.read(name).figures.items():
        how = value.how
        assert how.isprintable(), figure
        assert 10 < len(how) < 250, figure
        if value.low < value.high:  # what is not read off a sheet says that somebody assumed it
            assert "assumed" in how or how.startswith(("derived: ", MEASURED)), figure
        if match := SHARE.fullmatch(how):
            share, low, high = map(float, match.groups()[:3])
            assert value.low / low == pytest.approx(value.value / share, rel=1e-3), figure
            assert value.high / high == pytest.approx(value.value / share, rel=1e-3), figure
            assert SOURCE.search(how), f"{figure}: what is its source?"
        elif not how.startswith(MEASURED):
            assert not figure.startswith(("flops_", "h2d", "d2h", "duplex")), figure
        if "data sheet" in how or "paper" in how:
            assert re.search(r"\b20[12][0-9]\b", how), f"{figure}: of what year is its source?"


@each
def test_it_is_plausible_beside_the_data_sheet(name: str) -> None:
    machine = Machine.read(name)
    memory, flops, bandwidth, link, peers, devices = SHEETS[name]
    assert machine.value("devices") == devices
    if machine.device == "cpu":
        assert machine.figures["device_memory"].value == machine.value("host_memory"), "they are one memory"
        assert machine.value("device_bandwidth") == machine.value("host_bandwidth")
    assert 0.9 * memory < machine.value("device_memory") < 1.08 * memory  # of some, GB are more than 10**9 bytes
    peaks = {"flops_bfloat16": flops, "flops_float16": flops, "device_bandwidth": bandwidth, "device_update": bandwidth}
    peaks |= dict.fromkeys(("h2d", "d2h", "h2d_pageable", "d2h_pageable"), link) | {"duplex": 2 * link}
    peaks |= {"link_bandwidth": peers}
    for figure, peak in peaks.items():
        if machine.has(figure):
            slow = figure == "flops_float16" and machine.device == "cpu"  # which has no instructions for it
            assert peak / (12 if slow else 8) < machine.value(figure) < peak, figure
            assert machine.figures[figure].high < 1.01 * peak, figure
    assert machine.value("flops_float32") < machine.value("flops_bfloat16")


@pytest.mark.parametrize("path", sorted((FOLDER / "gpus").glob("*.json")), ids=lambda path: path.stem)
def test_any_gpu_makes_a_machine_with_any_host(path: Path, tmp_path: Path) -> None:
    gpu = json.loads(path.read_text())
    assert [found["name"] for found in gpus() if re.search(found["match"], gpu["name"])] == [gpu["name"]]
    assert re.search(r"\b20[12][0-9]\b", gpu["source"])
    file = tmp_path / "ours.json"
    parts = {"penstock": "machine", "version": 1, "name": "ours", "what": "a pair", "gpu": path.stem, "gpus": 2}
    for host in sorted((FOLDER / "hosts").glob("*.json")):
        file.write_text(json.dumps(parts | {"host": host.stem, "figures": {"disk_read": 1e9}}))
        made = Machine.read(file)
        assert made.value("disk_read") == 1e9
        assert made.has("flops_bfloat16") == bool(gpu["bfloat16"])
        assert made.fingerprint["accelerator"] == f"2 x {gpu['name']}"


def test_a_part_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "ours.json"
    parts = {"penstock": "machine", "version": 1, "name": "ours", "what": "one", "gpu": "rtx409", "host": "../x"}
    file.write_text(json.dumps(parts))
    with pytest.raises(ConfigError, match=r"ours.json is not read: There is no gpu 'rtx409'.* Did you mean rtx4090\?"):
        Machine.read(file)
    file.write_text(json.dumps(parts | {"gpu": "rtx4090"}))
    with pytest.raises(ConfigError, match=r"There is no host '\.\./x'"):
        Machine.read(file)


# The page


def table_of_figures() -> str:
    rows = [f"| `{name}` | {about.unit} | {about.meaning} |" for name, about in RATES.items()]
    return "\n".join(["| figure | unit | meaning |", "| --- | --- | --- |", *rows])


COLUMNS = {
    "device memory": "device_memory",
    "bf16": "flops_bfloat16",
    "device bandwidth": "device_bandwidth",
    "h2d": "h2d",
    "links": "link_bandwidth",
    "host memory": "host_memory",
    "host bandwidth": "host_bandwidth",
    "folders": "folders",
    "read": "disk_read",
    "write": "disk_write",
}


def table_of_machines() -> str:
    rows = []
    for name in shipped():
        machine = Machine.read(name)
        cells = [
            write_value(figure, machine.value(figure)) if machine.has(figure) else "-" for figure in COLUMNS.values()
        ]
        rows.append(f"| `{name}` | {' | '.join([machine.fingerprint['what'], *cells])} |")
    return "\n".join([f"| name | what | {' | '.join(COLUMNS)} |", "| --- " * (len(COLUMNS) + 2) + "|", *rows])


def test_the_page_has_every_figure_and_every_machine_that_comes_along() -> None:
    assert table_of_figures() in PAGE
    assert table_of_machines() in PAGE


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = PAGE.split("```python\n")[1].split("```")[0].replace("penstock.planner", "penstock.planner.machine")
    exec(compile(code, "docs/machines.md", "exec"), {})
    assert (tmp_path / "ours.json").exists()
