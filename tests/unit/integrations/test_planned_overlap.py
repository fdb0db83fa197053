"""Trainer asks for norms before each step: a plan whose updates begin in backward is refused like the same by hand."""

import pytest

from penstock.errors import ConfigError
from penstock.integrations.transformers.settings import check_arguments
from tests.lib.plans import plan


def test_a_plan_whose_updates_begin_in_backward_is_refused() -> None:
    check_arguments({"placement": "auto", "plan": plan()})
    check_arguments({"placement": "auto", "plan": "plan.json"})
    with pytest.raises(ConfigError, match=r"updates would have begun\. Plan again with overlap='forward'\.$"):
        check_arguments({"placement": "auto", "plan": plan(overlap="backward")})
