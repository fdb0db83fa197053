"""A plan as a file: what was written is read back to the bit, and what no plan can say is refused in a line."""

import json
from pathlib import Path

import pytest

from penstock import ConfigError, Options, Placement
from penstock.planner.plans import MOST_BYTES, Plan
from tests.lib.plans import DESKTOP, plan, too_large

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


def written(folder: Path, content: bytes | str) -> Path:
    file = folder / "plan.json"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


@pytest.mark.parametrize(
    "made",
    [
        DESKTOP,
        too_large(),
        plan(placement=Placement()),
        plan(placement=Placement(activations="nvme", nvme_path=["/a", "/b c"])),
        plan(options=Options(streamed_updates="auto", max_skipped_steps=None, state_dtype="int8", timeout_s=1e-3)),
        plan(world_size=8, hosts=2, mesh={"dp_replicate": 2, "dp_shard": 4}),
        plan(world_size=8, hosts=2, stage=0, precision="fp16", rounding_notes=("ü ✓ \U0001f600",)),
    ],
)
def test_what_was_written_is_read_back(made, tmp_path):
    again = Plan.read(written(tmp_path, made.to_json()))
    assert again == made
    assert again.to_json() == made.to_json()
    assert str(again) == str(made)


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
        (
            {"penstock": "machine"},
            'it has no "penstock": "plan", so it is no plan. Mend it, or name another file.',
        ),
        ({"version": 2}, "its version is 2, and this Penstock reads 1. Mend it"),
        ({"placment": {}}, "'placment' is no key that is read. Did you mean 'placement'? Correct it, or leave it out."),
        ({"unit_micro_batches": 2}, "unit_micro_batches=2 was removed: blocks run whole micro-batches. Leave it out."),
        ({"a\nb\x1b": 1}, "'a\\nb\\x1b' is no key that is read. Correct it"),
        ({"busy_s": ...}, "'busy_s' is missing: add it."),
        ({"placement": {"param": "cpu"}}, "'placement.param' is no key that is read. Did you mean 'params'?"),
        ({"placement": {"params": "ram"}}, "params='ram' is not a tier. Use one of 'device', 'cpu', 'nvme'."),
        ({"placement": {"params": {"cpu": 0.5}}}, "The fractions of params={'cpu': 0.5} sum to 0.5."),
        ({"placement": {"nvme_path": 3}}, "nvme_path=3: use a folder, a list of folders, or None."),
        ({"options": {"tile_byte": 1}}, "'options.tile_byte' is no key that is read. Did you mean 'tile_bytes'?"),
        ({"options": {"tile_bytes": 1}}, "Options(tile_bytes=1): use a whole number of bytes, 4096 or more."),
        (
            {"options": {"state_dtype": ["fp32"]}},
            "'options.state_dtype' is ['fp32']: use one of 'fp32', 'bf16', 'int8'",
        ),
        ({"step_s": 10**70}, "step_s=1e+70 contradict each other"),
        ({"step_range_s": [1, 2, 3]}, "'step_range_s' has 3 items: use 2"),
        ({"lacks": [7]}, "'lacks[0]' is 7: use an object"),
        ({"lacks": [{"tier": "cpu"}]}, "'lacks[0].bytes' is missing"),
        (
            {"why": [{"choice": "a", "chosen": "b", "next_best": "c", "cost": 1}]},
            "'why[0].cost' is no key that is read.",
        ),
        ({"self": 1}, "'self' is no key that is read"),
    ],
)
def test_a_value_that_no_plan_has_is_refused_with_its_file_and_key(changes, words, tmp_path):
    assert words in said_of(edited(tmp_path, **changes))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is no JSON"),
        (TEXT[:-20], "it is no JSON"),
        (TEXT.replace("4.12", "1e999"), "'step_s' is inf: use a finite number"),
        (TEXT + " " * MOST_BYTES, "it has more than 4,194,304 bytes. Mend it, or name another file."),
    ],
)
def test_what_is_no_plan_is_refused(content, words, tmp_path):
    assert words in said_of(written(tmp_path, content))


def test_what_is_no_file_or_no_path_is_refused(tmp_path):
    assert "is not read: No such file or directory. Mend it, or name another file." in said_of(tmp_path / "plan.json")
    assert "it is no file" in said_of(tmp_path)
    for path in (3, None, "a\0b", b"plan.json"):
        with pytest.raises(ConfigError, match="is not read: "):
            Plan.read(path)
