"""`penstock plan`: whether a model trains on a machine, how long a step is, what binds, and where state should be."""

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import typer

from penstock.cli.request import Request
from penstock.errors import ConfigError


def _as_command(run: Callable[[Request], None]) -> Callable[..., None]:
    """Return a function of the fields of a `Request`, which typer reads the options from."""

    def command(**given: Any) -> None:
        run(Request(**given))

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    signature = inspect.signature(Request)
    command.__signature__ = signature.replace(return_annotation=None)  # type: ignore[attr-defined]
    command.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
    return command


@_as_command
def plan(request: Request) -> None:
    """Say whether a model trains on a machine, how long a step is, what binds, and where state should be.

    Nothing is loaded: a configuration is enough, and the machine may be one that you do not have. Exit status 1 means
    that it does not fit, or that a step takes longer than --max-step.
    """
    if find_spec("transformers") is None:
        raise ConfigError("penstock plan needs transformers. Install it with: pip install 'penstock[train]'")
    # Here, not at the top: it imports torch and transformers, which --help does not wait for.
    from penstock.cli import planning
    from penstock.planner import Plan, compare

    if request.compare:
        first, second = request.compare
        print(compare(Plan.read(first), Plan.read(second), names=(str(first), str(second))))
        return
    question = planning.ask(request)
    found = question.answer()
    if request.out:
        planning.write(found, request.out)
    print(found.to_json().rstrip() if request.json else planning.about(found, question))
    if not (found.fits and planning.is_short_enough(found, request)):
        raise typer.Exit(1)
