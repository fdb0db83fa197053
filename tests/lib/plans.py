"""Plans to test with: one that fits a desktop, and changes of it."""

from dataclasses import replace
from typing import Any

from penstock.config import Options, Placement
from penstock.planner.plans import Plan, Reason, Shortfall, WhatIf

MIB, GIB = 1 << 20, 1 << 30

DESKTOP = Plan(
    placement=Placement(
        params={"device": 0.3125, "cpu": 0.6875},
        grads="cpu",
        optimizer={"cpu": 0.828125, "nvme": 0.171875},
        nvme_path="/scratch",
    ),
    overlap="forward",
    options=Options(),
    recompute=True,
    world_size=1,
    fits=True,
    step_s=4.12,
    step_range_s=(3.81, 4.52),
    bound_by="host update",
    bytes={"device": 4710 * MIB, "cpu": 98 * GIB, "nvme": 13 * GIB},
    peak_bytes={"device": 22323 * MIB, "cpu": 98 * GIB, "nvme": 13 * GIB},
    busy_s={"host update": 3.25, "device compute": 2.1, "NVMe reads": 0.31, "host-to-device link": 0.0042},
    written_bytes={"nvme": 14_000_000_000},
    disk_endurance_bytes=1200e12,
    machine="rtx4090-desktop",
    device="cuda",
    machine_fingerprint={"cpu": "Ryzen 9", "cores": 16, "accelerators": ["RTX 4090"]},
    batch="input_ids int64[16, 1024], labels int64[16, 1024]",
    tokens_per_s=16384 / 4.12,
    limit_bytes={"device": 23654 * MIB, "cpu": 110 * GIB, "nvme": 900 * GIB},
    kind_bytes={
        "params": {"device": 4710 * MIB, "cpu": 10362 * MIB},
        "grads": {"cpu": 15072 * MIB},
        "optimizer": {"cpu": 74 * GIB, "nvme": 13 * GIB},
        "activations": {"device": 6246 * MIB},
    },
    waits_s={"update layers.3 (update)": 0.5, "update layers.4 (update)": 0.4, "fetch layers.0 (fetch)": 0.2},
    what_ifs=(
        WhatIf("a second SSD", 0.2),
        WhatIf("8-bit states", 0.8),
        WhatIf("batch 32", tokens_share=0.38),
        WhatIf("half the cores", -1.5),
    ),
    why=(
        Reason("recompute", "yes", "no", None, "activations take 41.2 GiB of 23.1 GiB"),
        Reason("optimizer", "83% cpu, 17% nvme", "100% nvme", 0.31),
    ),
)


SMALL = Plan(
    placement=Placement(grads="cpu", optimizer={"device": 0.5, "cpu": 0.5}),
    overlap="forward",
    options=Options(tile_bytes=1 << 14),
    recompute=False,
    world_size=1,
    fits=True,
    step_s=0.5,
    step_range_s=(0.4, 0.6),
    bound_by="host update",
    bytes={"device": 1 << 14, "cpu": 1 << 14},
    peak_bytes={"device": 1 << 15, "cpu": 1 << 14},
    busy_s={"host update": 0.4},
    precision="fp32",
)
"""For any small model, on any machine, in fp32 on one rank."""


def small(**changes: Any) -> Plan:
    """Change some fields of the small plan."""
    return replace(SMALL, **changes)


def plan(**changes: Any) -> Plan:
    """Change some fields of the desktop's plan."""
    return replace(DESKTOP, **changes)


def too_large(**changes: Any) -> Plan:
    """Change the desktop's plan to one that does not fit."""
    lacks = (Shortfall("device", 3 * GIB + 12345, "1 more rank, 2 in all"),)
    unknown = {"step_s": 0, "step_range_s": (0, 0), "tokens_per_s": 0, "busy_s": {}, "waits_s": {}, "what_ifs": ()}
    peaks = {"device": 26726 * MIB, "cpu": 98 * GIB, "nvme": 13 * GIB}
    return plan(**({"fits": False, "peak_bytes": peaks, "lacks": lacks, **unknown} | changes))
