"""`penstock data`: its options are the fields of `DataConfig`, those of `penstock train` that say what is read."""

from penstock.cli.commands import command_of, require_transformers
from penstock.cli.naming import naming_options
from penstock.cli.training.config import DataConfig, TrainConfig


@command_of(DataConfig, file=TrainConfig)
def data(config: DataConfig) -> None:
    """Show what penstock train would learn of some data: sequences, what of them are labels, and what is cut.

    Learned text is green, or in ⟦ ⟧ where there is no colour. Nothing is trained and no weights are read. --config
    takes the file of a run.
    """
    require_transformers("data")
    # Here, not at the top: it imports torch and transformers, which --help does not wait for.
    from penstock.cli.training.looking import look

    with naming_options():
        look(config)
