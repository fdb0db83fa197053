"""What a Trainer is refused before anything is prepared: each would do nothing, or the wrong thing, in silence."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging

from penstock.errors import ConfigError
from penstock.integrations.engine_internals import encode
from penstock.integrations.lightning.precision import by_value


def check_trainer(trainer: Any, arguments: Mapping[str, Any], *, sharded: bool) -> None:
    """Refuse what a Trainer asks for beside this strategy.

    Arguments:
        trainer: the Trainer, about to run.
        arguments: those of `penstock.prepare`.
        sharded: whether weights are never gathered.

    Raises:
        ConfigError: names the argument, the callback or the hyper-parameter, and what to do instead.
    """
    clip = trainer.gradient_clip_val
    if clip and arguments.get("max_grad_norm") is not None:
        raise ConfigError(
            f"Trainer(gradient_clip_val={clip}) and the strategy's max_grad_norm={arguments['max_grad_norm']} would "
            "both clip. Leave the strategy's out."
        )
    if clip and str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)) == "value":
        raise by_value()
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ConfigError(
                f"{type(callback).__name__} copies and averages parameters, which are not there as a whole. Use "
                "penstock.EMA over trainer.strategy.optimizers[0] in a callback of your own."
            )
        if sharded and isinstance(callback, ModelCheckpoint) and callback.save_weights_only:
            raise weights_alone()
    for owner in (trainer.lightning_module, trainer.datamodule):
        try:
            encode(dict(getattr(owner, "hparams", None) or {}), {}, what="hyper_parameters")
        except ConfigError as error:
            raise ConfigError(
                f"{error} Leave it out: {type(owner).__name__}'s save_hyperparameters(ignore=[...])."
            ) from error


def weights_alone() -> ConfigError:
    """Make the error of saving weights alone where they are never gathered; the caller raises it."""
    return ConfigError(
        "save_weights_only with state_dict_type='sharded': a file of weights alone needs all of them in host memory. "
        "Save whole checkpoints and penstock.export() one, or use state_dict_type='full'."
    )
