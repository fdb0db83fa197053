"""Random programmes of a training loop give what plain torch gives, or are refused by name.

Forward, backward, retained and recorded graphs, hooks, moves, writes, saves and loads, and interrupts at any line, on
every kind of streams and placement: see `programmes.py`. `make fuzz SEED=` asks for those from one on; a failure says
its seed and the whole programme.
"""

import pytest

from tests.lib.fuzz import SEED, TIMES
from tests.property.programmes import draw_programme, run_programme

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(SEED, SEED + 40 * TIMES))
def test_a_programme_gives_what_torch_gives_or_is_refused_by_name(seed: int) -> None:
    run_programme(*draw_programme(seed))
