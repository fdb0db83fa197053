"""What differs between two plans stands first, with both values; what does not stands below, once."""

from penstock import Options, Placement
from penstock.planner.plans import compare
from tests.lib.plans import DESKTOP, plan


def parts(text: str) -> tuple[list[str], list[str]]:
    above, below = text.split("\nthe same\n")
    return above.splitlines(), below.splitlines()


def test_what_differs_stands_first_with_both_values():
    other = plan(
        placement=Placement(params="cpu", grads="cpu", optimizer="cpu"),
        options=Options(tile_bytes=1 << 20),
        step_s=3.3,
        step_range_s=(3, 4),
        busy_s=dict(DESKTOP.busy_s) | {"host update": 2.0, "NVMe writes": 0.05},
    )
    above, below = parts(compare(DESKTOP, other, names=("a.json", "b.json")))
    assert above == [
        "differs: a.json -> b.json",
        "  step: 4.12 s (3.81-4.52), 3,977 tokens/s -> 3.30 s (3.00-4.00), 3,977 tokens/s",
        "  params: 0.31 4.60 GiB | 0.69 10.1 GiB | - -> - 4.60 GiB | 1.00 10.1 GiB | -",
        "  optimizer: - | 0.83 74.0 GiB | 0.17 13.0 GiB -> - | 1.00 74.0 GiB | - 13.0 GiB",
        "  written: nvme 14.0 GB a step, 294 TB a day; a drive of 1,200 TBW lasts 85,714",
        "      steps, 4.09 days -> nvme 14.0 GB a step, 367 TB a day; a drive of 1,200",
        "      TBW lasts 85,714 steps, 3.27 days",
        "  busy: host update: 3.25 s -> 2.00 s",
        "  busy: NVMe writes: - -> 50.0 ms",
        "  Options(tile_bytes): - -> 1048576",
    ]
    assert "  gradients                    - | 1.00 14.7 GiB | -" in below


def test_equal_plans_differ_in_nothing():
    above, below = parts(compare(DESKTOP, plan()))
    assert above == ["nothing differs"]
    assert below[:3] == [
        "  fits                         yes",
        "  step                         4.12 s (3.81-4.52), 3,977 tokens/s",
        "  tiers                        device | host | nvme",
    ]
    assert "  busy: host-to-device link    4.20 ms" in below
