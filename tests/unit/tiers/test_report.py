"""The table as a person or a program reads it."""

import json

import pytest
import torch

from penstock import ConfigError, Location, LocationReport, PenstockError

REPORT = LocationReport(
    [
        Location("root", "param", "device", torch.bfloat16, 1000, 2000, False, False),
        Location("blocks.0", "param", "cpu", torch.bfloat16, 3000, 6000, True, False),
        Location("blocks.1", "param", "cpu", torch.bfloat16, 3000, 6000, True, True),
        Location("blocks.0", "grad", "cpu", torch.bfloat16, 3000, 6000, True, False),
        Location("blocks.0", "master", "cpu", torch.int16, 3000, 6000, True, False),
        Location("blocks.0", "exp_avg", "cpu", torch.float32, 3000, 12000, True, False),
        Location("blocks.0", "exp_avg_sq", "cpu", torch.float32, 3000, 12000, True, False),
        Location("(update, even)", "staging", "cpu", torch.bfloat16, 100, 200, True, False),
        Location("root", "gathered", "device", torch.bfloat16, 1000, 2000, False, False),
    ]
)


@pytest.mark.parametrize(
    ("question", "nbytes"),
    [
        ({}, 52200),
        ({"tier": "cpu"}, 48200),
        ({"tier": "gpu"}, 4000),
        ({"kind": "param", "tier": "cpu", "unit": "blocks.1"}, 6000),
        ({"kind": "optimizer"}, 24000),
        ({"kind": "no such"}, 0),
    ],
)
def test_bytes_by_kind_tier_and_unit(question: dict[str, str], nbytes: int) -> None:
    assert REPORT.bytes(**question) == nbytes


def test_an_unknown_tier_is_refused() -> None:
    with pytest.raises(ConfigError, match="tier='ram' is not a tier"):
        REPORT.bytes(tier="ram")


def test_assert_on_names_the_first_cell_elsewhere() -> None:
    REPORT.assert_on("optimizer", "cpu")
    REPORT.assert_on("gathered", "cuda")
    with pytest.raises(PenstockError) as caught:
        REPORT.assert_on("param", "cpu")
    text = "'param' of unit 'root' (2,000 bytes, torch.bfloat16) is on the device tier, not on cpu."
    assert str(caught.value) == text


def test_a_program_reads_it_as_json() -> None:
    value = REPORT.to_dict()
    assert json.loads(json.dumps(value)) == value
    assert value["bytes"]["param"] == {"device": 2000, "cpu": 12000}
    assert value["bytes"]["exp_avg"] == {"cpu": 12000}
    assert value["totals"] == {"device": 4000, "cpu": 48200}
    assert value["rows"][2] == {
        "unit": "blocks.1",
        "kind": "param",
        "tier": "cpu",
        "dtype": "bfloat16",
        "numel": 3000,
        "nbytes": 6000,
        "pinned": True,
        "in_flight": True,
    }


def test_a_person_reads_it_as_a_table() -> None:
    assert (
        str(REPORT)
        == """\
kind         tier    dtype     pinned   units           values              bytes          in flight
param        device  bfloat16  no           1            1,000              2,000                  -
param        cpu     bfloat16  yes          2            6,000             12,000              6,000
grad         cpu     bfloat16  yes          1            3,000              6,000                  -
master       cpu     int16     yes          1            3,000              6,000                  -
exp_avg      cpu     float32   yes          1            3,000             12,000                  -
exp_avg_sq   cpu     float32   yes          1            3,000             12,000                  -
staging      cpu     bfloat16  yes          1              100                200                  -
gathered     device  bfloat16  no           1            1,000              2,000                  -
total        device                                                        4,000                  -
total        cpu                                                          48,200              6,000"""
    )
