"""A plan as a file: what was written is read back to the bit, and what no plan can say is refused in a line."""

import json
from pathlib import Path

import pytest

from penstock import ConfigError
from penstock.planner.plans import Plan
from tests.lib.plans import DESKTOP, plan

DATA = Path(__file__).parents[2] / "data" / "planner"
TEXT = DESKTOP.to_json()


def said_of(file: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        Plan.read(file)
    message = str(refused.value)
    assert message.startswith(f"{file} is not read: ")
    assert "\n" not in message
    assert len(message) < 1000
    return message


def edited(folder: Path, **changes: object) -> Path:
    """The desktop's file with other values; a value of `...` takes the key out."""
    content = json.loads(TEXT) | changes
    file = folder / "plan.json"
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    return file


def test_equal_plans_are_equal_texts_with_sorted_keys():
    turned = plan(busy_s=dict(reversed(DESKTOP.busy_s.items())), bytes=dict(reversed(DESKTOP.bytes.items())))
    assert turned.to_json() == TEXT
    content = json.loads(TEXT)
    assert list(content) == sorted(content)
    assert content["penstock"] == "plan"
    assert content["version"] == 1
    assert content["placement"]["params"] == {"cpu": 0.6875, "device": 0.3125}
    assert content["why"][0] == {
        "choice": "recompute",
        "chosen": "yes",
        "next_best": "no",
        "cost_s": None,
        "words": "activations take 41.2 GiB of 23.1 GiB",
    }


def test_files_of_other_versions_are_read_without_what_nothing_reads_any_more(tmp_path):
    """With blocks that run whole batches; with a bound; from before there were meshes, of ranks that share a copy."""
    assert Plan.read(edited(tmp_path, unit_micro_batches=1)) == DESKTOP
    file = DATA / "plan-0.2.json"
    assert {"gap", "lower_bound_s"} < json.loads(file.read_text()).keys()
    assert Plan.read(file) == plan(written_bytes={}, disk_endurance_bytes=0)
    before = Plan.read(edited(tmp_path, world_size=8, mesh=...))
    assert (before.mesh, before.sizes) == ({}, {"dp_replicate": 1, "dp_shard": 8, "tp": 1})
    assert before == plan(world_size=8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "its version is 2, and this Penstock reads 1. Mend it"),
        ({"placment": {}}, "'placment' is no key that is read. Did you mean 'placement'? Correct it, or leave it out."),
        ({"unit_micro_batches": 2}, "unit_micro_batches=2 was removed: blocks run whole micro-batches. Leave it out."),
        ({"a\nb\x1b": 1}, "'a\\nb\\x1b' is no key that is read. Correct it"),
        ({"busy_s": ...}, "'busy_s' is missing: add it."),
        ({"placement": {"nvme_path": 3}}, "nvme_path=3: use a folder, a list of folders, or None."),
        ({"options": {"tile_bytes": 1}}, "Options(tile_bytes=1): use a whole number of bytes, 4096 or more."),
        ({"step_s": 10**70}, "step_s=1e+70 contradict each other"),
    ],
)
def test_a_value_that_no_plan_has_is_refused_with_its_file_and_key(changes, words, tmp_path):
    assert words in said_of(edited(tmp_path, **changes))
