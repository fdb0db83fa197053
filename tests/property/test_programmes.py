"""Random programmes of a training loop give what plain torch gives, or are refused by name.

Forward, backward, retained and recorded graphs, hooks, moves, writes, saves and loads, and interrupts at any line, on
every kind of streams and placement: see `programmes.py`. `PENSTOCK_PROGRAMMES` asks for another number of programmes,
`PENSTOCK_SEED` for those from a seed on; a failure says its seed and the whole programme.
"""

import os

import pytest

from tests.property.programmes import draw_programme, run_programme
from tests.support import thorough

SOME, ALL = 15, 200
COUNT = int(os.environ.get("PENSTOCK_PROGRAMMES", "0"))
FIRST = int(os.environ.get("PENSTOCK_SEED", "0"))
SEEDS = range(FIRST, FIRST + (COUNT or ALL))

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("seed", [seed if COUNT or seed < FIRST + SOME else thorough(seed) for seed in SEEDS])
def test_a_programme_gives_what_torch_gives_or_is_refused_by_name(seed: int) -> None:
    run_programme(*draw_programme(seed))
