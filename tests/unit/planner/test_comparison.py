"""Two plans side by side: what differs stands first, with its change; what does not stands below, once."""

from penstock import Options, Placement
from penstock.planner.plans import compare
from tests.plans import DESKTOP, GIB, plan, too_large


def parts(text: str) -> tuple[list[str], list[str]]:
    above, below = text.split("\nthe same\n")
    return above.splitlines(), below.splitlines()


def names(lines: list[str]) -> list[str]:
    return [line.split("    ")[0].strip() for line in lines]


def test_what_differs_stands_first_with_its_change():
    other = plan(
        placement=Placement(params="cpu", grads="cpu", optimizer="cpu"),
        options=Options(tile_bytes=1 << 20),
        step_s=3.3,
        step_range_s=(3, 4),
        bytes={"cpu": 111 * GIB},
        busy_s=dict(DESKTOP.busy_s) | {"host update": 2.0, "host-to-device link": 0.0, "NVMe writes": 0.05},
    )
    above, below = parts(compare(DESKTOP, other, names=("a.json", "b.json")))
    assert above == [
        "differs                        a.json                   b.json",
        "  step                         4.12 s                   3.30 s     -20 %",
        "  optimizer                    0.83 host + 0.17 nvme    host",
        "  at rest: device              4.60 GiB                 0 B",
        "  at rest: host                98.0 GiB                 111 GiB",
        "  at rest: nvme                13.0 GiB                 0 B",
        "  busy: host update            3.25 s                   2.00 s     -38 %",
        "  busy: host-to-device link    4.20 ms                  0 s        -100 %",
        "  Options(tile_bytes)          -                        1048576",
        "  busy: NVMe writes            -                        50.0 ms",
        "  params",  # too long to stand beside each other
        "    0.31 device + 0.69 host",
        "    host",
    ]
    assert "  gradients               host" in below
    assert not set(names(above)) & set(names(below))


def test_equal_plans_differ_in_nothing():
    above, below = parts(compare(DESKTOP, plan()))
    assert above == ["nothing differs"]
    assert below[:4] == [
        "  fits                         yes",
        "  step                         4.12 s",
        "  tokens/s                     3,977",
        "  bound by                     host update",
    ]
    assert below[-6:] == [
        "  busy: host update            3.25 s",
        "  busy: device compute         2.10 s",
        "  busy: NVMe reads             0.31 s",
        "  busy: host-to-device link    4.20 ms",
        "  waits: update                0.90 s",
        "  waits: fetch                 0.20 s",
    ]


def test_what_differs_in_the_fourth_digit_is_the_same():
    assert parts(compare(DESKTOP, plan(step_s=4.1201)))[0] == ["nothing differs"]


def test_a_plan_that_does_not_fit_says_what_it_lacks():
    above, _ = parts(compare(DESKTOP, too_large()))
    assert above[0].split() == ["differs", "first", "second"]
    assert all(len(line) <= 80 for line in above)
    at = above.index("  fits")
    assert above[at + 1 : at + 3] == [
        "    yes",
        "    no: 3.00 GiB (3,221,237,817 bytes) too few on the device. Smallest change: 1",
    ]


def test_a_plan_for_another_run_shows_what_it_is_for():
    other = plan(world_size=4, hosts=2, stage=1, precision="fp32", machine="laptop", batch="", model_fingerprint="x")
    above, _ = parts(compare(DESKTOP, other))
    assert names(above[1:7]) == ["mesh", "precision", "stage", "hosts", "machine", "model"]
    assert above[7:] == ["  batch", "    input_ids int64[16, 1024], labels int64[16, 1024]", "    -"]


def test_a_cpu_has_one_column_for_its_memory():
    above, _ = parts(compare(DESKTOP, plan(device="cpu")))
    rows = {line.split("  ")[1].strip(): line for line in above[1:]}
    assert rows["at rest: device"].split()[-1] == "-"
    assert rows["at rest: host"].split()[-2:] == ["103", "GiB"]
