"""`penstock plan`: its options are the fields of `PlanConfig`, its work is `penstock.cli.planning`."""

from pathlib import Path

import typer

from penstock.cli.commands import command_of, require_transformers
from penstock.cli.naming import naming_options
from penstock.cli.planning.config import PlanConfig


@command_of(PlanConfig)
def plan(config: PlanConfig) -> None:
    """Say whether a model trains on a machine, how long a step is, what binds, and where state should be.

    Nothing is loaded: a configuration is enough, and the machine may be one that you do not have. Exit status 1 means
    that it does not fit, or that a step takes longer than --max-step.
    """
    require_transformers("plan")
    with naming_options():
        # Here, not at the top: it imports torch and transformers, which --help does not wait for.
        from penstock.cli.planning.answer import about, is_short_enough, side_by_side
        from penstock.cli.planning.question import ask, stating_figures
        from penstock.cli.training.planning import write_plan

        if config.compare:
            print(side_by_side(*config.compare))
            return
        with stating_figures():
            question = ask(config)
            found = question.answer()
        if config.out:
            write_plan(found, Path(config.out))
        print(found.to_json().rstrip() if config.json else about(found, question))
        if not (found.fits and is_short_enough(found, config)):
            raise typer.Exit(1)
