"""Any plan is read back from its file to the bit, and whatever else is in such a file is refused in a line.

`make fuzz` draws more examples.
"""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from penstock import ConfigError, Options, Placement
from penstock.planner.plans import KINDS, Plan, Reason, Shortfall, WhatIf
from tests.lib.fuzz import examples
from tests.lib.plans import DESKTOP

TEXT = DESKTOP.to_json()


def written(file: Path, content: str) -> Path:
    file.write_text(content)
    return file


TIERS = ("device", "cpu", "nvme")
BYTES = st.dictionaries(st.sampled_from(TIERS), st.integers(0, 1 << 62))
SECONDS = st.floats(0, 1e9, allow_subnormal=True) | st.integers(0, 1000)
TEXTS = st.text(max_size=12) | st.text(alphabet=" \n\x1b\udfff.", min_size=200, max_size=400)
SIGNED = st.none() | st.floats(-1e9, 1e9)


@st.composite
def storages(draw: st.DrawFn) -> object:
    parts = draw(st.lists(st.integers(0, 64), min_size=3, max_size=3))
    if not sum(parts):
        return draw(st.sampled_from(TIERS))
    return {tier: part / sum(parts) for tier, part in zip(TIERS, parts, strict=True)}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    step, hosts = draw(SECONDS), draw(st.integers(1, 4))
    lacks = draw(st.lists(st.builds(Shortfall, st.sampled_from(TIERS), st.integers(1, 1 << 62), TEXTS), max_size=2))
    return Plan(
        placement=Placement(
            params=draw(storages()),
            grads=draw(storages()),
            optimizer=draw(storages()),
            activations=draw(st.none() | st.sampled_from(TIERS)),
            nvme_path=draw(st.none() | st.text(max_size=5) | st.lists(st.text(max_size=5), max_size=3)),
        ),
        overlap=draw(st.sampled_from(["none", "forward", "backward", "auto"])),
        options=Options(
            streamed_updates=draw(st.just("auto") | st.floats(0, 1)),
            timeout_s=draw(st.floats(1e-300, 1e300)),
            device_bytes=draw(st.none() | st.integers(1, 1 << 62)),
            state_dtype=draw(st.sampled_from(["fp32", "bf16", "int8"])),
        ),
        recompute=draw(st.booleans()),
        world_size=hosts * draw(st.integers(1, 1024)),
        fits=not lacks,
        step_s=step,
        step_range_s=(step * draw(st.floats(0, 1)), step + draw(st.floats(0, 5))),
        bound_by=draw(TEXTS),
        bytes=draw(BYTES),
        peak_bytes=draw(BYTES),
        busy_s=draw(st.dictionaries(TEXTS, SECONDS, max_size=3)),
        written_bytes=draw(BYTES),
        stage=draw(st.integers(0, 3)),
        precision=draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        hosts=hosts,
        machine=draw(TEXTS),
        device=draw(st.sampled_from(["cpu", "cuda", ""])),
        machine_fingerprint=draw(st.dictionaries(st.text(max_size=5), st.integers() | TEXTS, max_size=2)),
        batch=draw(TEXTS),
        tokens_per_s=draw(SECONDS),
        limit_bytes=draw(BYTES),
        kind_bytes=draw(st.dictionaries(st.sampled_from(KINDS), BYTES, max_size=2)),
        waits_s=draw(st.dictionaries(TEXTS, SECONDS, max_size=3)),
        what_ifs=draw(st.lists(st.builds(WhatIf, TEXTS, SIGNED, SIGNED), max_size=2)),
        why=draw(st.lists(st.builds(Reason, TEXTS, TEXTS, TEXTS, SIGNED, TEXTS), max_size=2)),
        rounding_notes=draw(st.lists(TEXTS, max_size=2)),
        lacks=lacks,
        disk_endurance_bytes=draw(SECONDS),
        unified_memory=draw(st.booleans()),
    )


@examples(30)
@given(made=plans())
def test_any_plan_is_read_back_and_can_be_shown(made, tmp_path):
    file = written(tmp_path / "plan.json", made.to_json())
    again = Plan.read(file)
    assert again == made
    assert again.to_json() == made.to_json()
    assert str(again) == str(made)
    assert all(line.isprintable() for line in str(made).splitlines())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)


@examples(30)
@given(key=st.sampled_from(sorted(json.loads(TEXT))), value=JSON, inside=st.booleans(), number=st.integers(0, 99))
def test_any_value_in_the_place_of_any_other_is_read_or_refused_in_a_line(key, value, inside, number, tmp_path):
    content = json.loads(TEXT)
    if inside and isinstance(content[key], dict) and content[key]:
        content[key][sorted(content[key])[number % len(content[key])]] = value
    else:
        content[key] = value
    file = written(tmp_path / "plan.json", json.dumps(content))
    said, made = "", None
    try:
        made = Plan.read(file)
    except ConfigError as error:
        said = str(error)
    if made is None:
        assert said.startswith(f"{file} is not read: ")
        assert "\n" not in said
        assert len(said) < 1000
    else:
        assert Plan.read(written(tmp_path / "plan.json", made.to_json())) == made
