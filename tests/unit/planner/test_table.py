"""A plan in words, to the letter: the table, the reasons, and what was predicted beside what was measured."""

from pathlib import Path
from textwrap import dedent

import pytest

from penstock import Options, Placement
from penstock.planner.formatting import seconds, share, signed, size
from penstock.planner.plans import Reason, Shortfall, block, explain, shortfalls_in_words
from tests.lib.plans import DESKTOP, GIB, MIB, plan, too_large

MEASURED = {"step": 4.9, "host update": 4.1, "device compute": 2.11, "NVMe reads": 0.31, "host-to-device link": 0.0043}
OUTSIDE = "what is not traced (data, loss, Python)"


def shows(text: str) -> str:
    return dedent(text).strip("\n")


PAGE = (Path(__file__).parents[3] / "docs" / "plan.md").read_text()


def line_of(text: str, start: str) -> str:
    [found] = [line for line in text.splitlines() if line.startswith(start)]
    return found


def test_a_plan_that_does_not_fit():
    lacks = (*too_large().lacks, Shortfall("nvme", 40 * MIB))
    lines = str(too_large(lacks=lacks)).splitlines()
    assert lines[:3] == [
        "fits: no      3.00 GiB (3,221,237,817 bytes) too few on the device. Smallest",
        "              change: 1 more rank, 2 in all. 40.0 MiB (41,943,040 bytes) too few",
        "              on nvme.",
    ]
    assert "peak / limit    26.1 / 23.1 GiB    98.0 / 110 GiB    13.0 / 900 GiB" in lines
    assert not any("waits" in line or "if it did" in line for line in lines)


def test_a_plan_for_a_cpu_where_device_and_host_are_one_memory():
    made = plan(
        placement=Placement(
            params={"device": 0.25, "cpu": 0.75},
            optimizer={"device": 0.5, "cpu": 0.4921875, "nvme": 0.0078125},
            activations="nvme",
            nvme_path="/scratch",
        ),
        recompute=False,
        step_s=0.0412,
        step_range_s=(0.0399, 0.0431),
        peak_bytes={"device": 700 * MIB, "cpu": 800 * MIB, "nvme": 10 * MIB},
        device="cpu",
        limit_bytes={"device": 8 * GIB, "cpu": 8 * GIB, "nvme": 100 * GIB},
        kind_bytes={"params": {"device": 64 * MIB, "cpu": 192 * MIB}, "activations": {"device": 1536, "nvme": MIB}},
    )
    assert str(made).startswith(
        shows("""
        fits: yes     step 41.2 ms (39.9-43.1), 3,977 tokens/s
                         host               nvme
        params           1.00 256 MiB       -
        gradients        1.00               -
        optimizer        >.99               <.01
        activations      1.50 KiB           1.00 MiB
        peak / limit     1.46 / 8.00 GiB    10.0 MiB / 100 GiB
    """)
    )
    lack = Shortfall("device", 1024, "use nvme.")
    assert shortfalls_in_words(plan(device="cpu", fits=False, lacks=(lack,))) == (
        "1.00 KiB (1,024 bytes) too few on the host. Smallest change: use nvme."
    )


def test_a_plan_for_one_of_two_ranks_with_updates_on_the_device():
    made = plan(
        placement=Placement(optimizer="cpu", activations="cpu", nvme_path=["/a", "/b", "/c", "/d"]),
        options=Options(streamed_updates=0.25),
        world_size=2,
        stage=2,
        batch="input_ids int64[16, 1024]",
        kind_bytes={},
        peak_bytes={"device": 5 * GIB, "nvme": 0},
        limit_bytes={},
        waits_s={"a x (y)": 1e-4, "b": 3e-5, "c": 2, "d": 0.2, "e": 2e-6},
        disk_endurance_bytes=600e12,
        rounding_notes=("a device may round otherwise than the host in the last place",),
        what_ifs=(),
    )
    assert str(made).endswith(
        shows("""
        activations      host (recomputed)
        peak / limit     5.00 GiB    -       -
        bound by         host update
        updates          overlap forward, 0.25 of the host's on the device
        waits exposed    c 2.00 s, d 0.20 s, a 100 us, others 32.0 us
        written          nvme 7.00 GB a step, 147 TB a day; a drive of 600 TBW lasts
                         85,714 steps, 4.09 days
        planned for      rtx4090-desktop, bf16, stage 2, input_ids int64[16, 1024], one
                         of 2 ranks
        may round otherwise: a device may round otherwise than the host in the last
          place
    """)
    )
    assert "labels int64[16, 1024], one of 16 ranks on 4 hosts\n" in str(plan(world_size=16, hosts=4))
    streamed = plan(options=Options(streamed_updates="auto"))
    assert line_of(str(streamed), "updates").endswith("forward, a measured share of the host's on the device")


def test_reasons_say_what_the_next_best_would_have_cost():
    why = (Reason("streamed_updates", "0", "0.25", 0.004, "the link is busy"), Reason("a", "b", "c", -0.5))
    assert explain(plan(why=why)) == shows("""
        streamed_updates: 0; next best: 0.25, +4.00 ms (the link is busy)
        a: b; next best: c, -0.50 s
    """)
    text = "Nothing to choose: the placement was given, or all of it fits on the device."
    assert explain(plan(why=())) == text


def test_the_block_at_the_end_of_a_run_names_what_differs():
    measured = {"step": 4.9, "host update": 4.1, "device compute": 2.11, "host-to-device link": 0.02, OUTSIDE: 0.3}
    assert block(DESKTOP, measured).splitlines()[3:] == [
        "                                             predicted    measured",
        "  step                                       4.12 s       4.90 s      +19 %",
        "  host update                                3.25 s       4.10 s      +26 %",
        "  device compute                             2.10 s       2.11 s      0 %",
        "  NVMe reads                                 0.31 s       -",
        "  host-to-device link                        4.20 ms      20.0 ms     +376 %",
        "  what is not traced (data, loss, Python)    -            0.30 s",
        "differs: step: 4.90 s measured, 4.12 s predicted (+19 %)",
        "differs: host update: 4.10 s measured, 3.25 s predicted (+26 %)",
        f"differs: {OUTSIDE}: 0.30 s measured, 0 s predicted",
    ]


@pytest.mark.parametrize(
    ("name", "times", "differs"),
    [
        ("step", 1.149, False),
        ("step", 1.151, True),
        ("host-to-device link", 9.0, False),  # less than 1 % of the step
        ("host-to-device link", 12.0, True),
    ],
)
def test_more_than_15_percent_differ_where_they_matter(name, times, differs):
    predicted = {"step": DESKTOP.step_s, **DESKTOP.busy_s}[name]
    said = [line for line in block(DESKTOP, {name: predicted * times}).splitlines() if line.startswith("differs: ")]
    assert [line.split(": ")[1] for line in said] == ([name] if differs else [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (size(0), "0 B"),
        (size(GIB - 1), "1,024 MiB"),
        (size(5 << 50), "5,120 TiB"),
        (seconds(0), "0 s"),
        (seconds(0, beside=0.01), "0 ms"),
        (seconds(0.094, beside=1), "94.0 ms"),
        (seconds(0.096, beside=1), "0.10 s"),
        (seconds(75, beside=0.01), "75,000 ms"),
        (signed(-0.25), "-250 ms"),
        (share(0.001), "0 %"),
        (share(12), "+1,200 %"),
    ],
)
def test_numbers_have_three_digits_and_a_unit(text, words):
    assert text == words


def test_the_page_shows_a_plan_its_reasons_and_its_end_as_they_are_printed():
    head = "\n".join(str(too_large()).splitlines()[:2])
    for text in (str(DESKTOP), head, explain(DESKTOP), block(DESKTOP, MEASURED)):
        assert text in PAGE
