"""The strategy of a Trainer: `Trainer(strategy=PenstockStrategy(placement=...))`, or `strategy="penstock"`."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import penstock
from penstock.errors import ConfigError
from penstock.integrations._common import check_precision, check_unplaced, put_state
from penstock.integrations.arguments import prepare_arguments
from penstock.integrations.engine_internals import encode
from penstock.integrations.lightning import checkpoints
from penstock.integrations.lightning.precision import PenstockPrecision, by_value, compute_of, unwrapped
from penstock.integrations.weights import gather_entries, state_entries

#: Keywords that are Lightning's: how processes start, and talk.
_OF_LIGHTNING = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "process_group_backend",
    "timeout",
    "start_method",
)


class PenstockStrategy(DDPStrategy):
    """Trains a LightningModule that `penstock.prepare` has sharded and placed. Processes start as those of DDP do.

    The module and its optimizer are prepared when a fit begins; at its end the optimizer is closed, and the module has
    whole parameters. `validate`, `test` and `predict` run `prepare(module, None)`. Checkpoints are folders; those of
    weights alone are Lightning's files.

    Arguments:
        precision_plugin: a `PenstockPrecision`; `None` for that of the Trainer's `precision=`.
        state_dict_type: `"full"` collects whole weights in host memory of the first rank for each checkpoint, so that
            hooks see them and `save_weights_only` works. `"sharded"` never does: for models larger than that memory.
        keep_params: whether the module has whole parameters after a run; `False` leaves them empty.
        arguments: those of `penstock.prepare`, by their types or as files hold them, and of `DDPStrategy` how processes
            start (`process_group_backend`, `timeout`, `start_method`, `cluster_environment`). `precision` may be left
            to the Trainer.

    Raises:
        ConfigError: `precision` is not what the Trainer was given. Other refusals are raised when a run begins, before
            anything changes.

    Attributes:
        step_result: the result of the last optimizer step, such as its `grad_norm`; `None` before the first.

    Example:
        >>> placement = penstock.Placement(optimizer="cpu")
        >>> trainer = Trainer(strategy=PenstockStrategy(placement=placement), precision="bf16-mixed")  # doctest: +SKIP
    """

    strategy_name = "penstock"

    def __init__(
        self,
        *,
        precision_plugin: PenstockPrecision | None = None,
        state_dict_type: Literal["full", "sharded"] = "full",
        keep_params: bool = True,
        **arguments: Any,
    ) -> None:
        if state_dict_type not in ("full", "sharded"):
            raise ConfigError(f"state_dict_type={state_dict_type!r}: use 'full' or 'sharded'.")
        launch = {name: arguments.pop(name) for name in _OF_LIGHTNING if name in arguments}
        self._arguments = prepare_arguments(arguments, source="the strategy")
        self._wanted = self._arguments.pop("precision", None)
        self._plugin = PenstockPrecision("fp32" if self._wanted is None else check_precision(self._wanted))
        self._sharded = state_dict_type == "sharded"
        self._keep_params = keep_params
        self._handle: penstock.Optimizer | None = None
        self._failed = False
        super().__init__(precision_plugin=precision_plugin, **launch)

    # Precision

    @property
    def precision_plugin(self) -> PenstockPrecision:
        """The plugin that maps precisions and clips."""
        return self._plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            compute = compute_of(plugin, self._wanted)
            self._plugin = plugin if isinstance(plugin, PenstockPrecision) else PenstockPrecision(compute)

    @property
    def step_result(self) -> penstock.StepResult | None:
        """The result of the last optimizer step."""
        return self.precision_plugin.step_result

    # Begin and end

    def setup(self, trainer: Any) -> None:
        """Prepare the module, with its optimizer where it is fitted. Collective.

        Raises:
            ConfigError: the Trainer asks for something that is not supported; names it. Nothing has changed.
        """
        assert self.accelerator is not None
        self._failed = False
        self._check_trainer(trainer)
        if self.world_size == 1:
            # Lightning divides the loaders of every DDPStrategy, and shuffles those of training, also for one rank.
            trainer._accelerator_connector.use_distributed_sampler = False
        self.accelerator.setup(trainer)
        self.optimizers, self.lr_scheduler_configs = list[Any](), list[Any]()
        if trainer.state.fn == TrainerFn.FITTING:
            if self._layer_sync:
                self.model = self._layer_sync.apply(self.lightning_module)
            self.setup_optimizers(trainer)
        else:
            self._prepare(None)

    def setup_optimizers(self, trainer: Any) -> None:
        """Have the module make its optimizer, and prepare both. Schedulers stay those of the module's optimizer.

        Raises:
            ConfigError: there is none, or there are several.
        """
        super().setup_optimizers(trainer)
        given, self.optimizers = self.optimizers, []
        if len(given) > 1:
            raise ConfigError(
                f"configure_optimizers() returned {len(given)} optimizers, and the strategy 'penstock' trains by one. "
                "Use one with param groups, or a loop that prepares each part by itself: the recipe 'Several "
                "optimizers' of docs/lightning.md."
            )
        if not given or not given[0].param_groups:  # Lightning's stand-in for None has no parameters
            raise ConfigError("configure_optimizers() returned no optimizer: the strategy 'penstock' trains by one.")
        self.optimizers = [self._prepare(given[0])]

    def _prepare(self, optimizer: Any) -> penstock.Optimizer:
        """Prepare the module for training by this optimizer, or for inference. Collective."""
        module = self.lightning_module
        assert module is not None
        check_unplaced(module)
        module.zero_grad()  # as Lightning does before a run, a moment later
        arguments = dict(self._arguments)
        if "weights" not in arguments and all(p.is_meta for p in module.parameters()):
            arguments["weights"] = "init"
        if self.root_device.type == "cpu" and "mesh" not in arguments and torch.distributed.is_initialized():
            # On a machine that has another device as well, the mesh is what names this one.
            arguments["mesh"] = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        self._handle = penstock.prepare(module, optimizer, precision=self.precision_plugin.compute, **arguments)
        return self._handle

    def _check_trainer(self, trainer: Any) -> None:
        """Refuse settings of a Trainer that would do nothing, or the wrong thing, without a word.

        Raises:
            ConfigError: names the argument, the callback or the hyper-parameter, and what to do instead.
        """
        clip, ours = trainer.gradient_clip_val, self._arguments.get("max_grad_norm")
        if clip and ours is not None:
            raise ConfigError(
                f"Trainer(gradient_clip_val={clip}) and the strategy's max_grad_norm={ours} would both clip. Leave the "
                "strategy's out."
            )
        if clip and str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)) == "value":
            raise by_value()
        for callback in trainer.callbacks:
            if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                raise ConfigError(
                    f"{type(callback).__name__} copies and averages parameters, which are not there as a whole. Use "
                    "penstock.EMA over trainer.strategy.optimizers[0] in a callback of your own."
                )
            if self._sharded and isinstance(callback, ModelCheckpoint) and callback.save_weights_only:
                raise _weights_alone()
        for owner in (trainer.lightning_module, trainer.datamodule):
            try:
                encode(dict(getattr(owner, "hparams", None) or {}), {}, what="hyper_parameters")
            except ConfigError as error:
                raise ConfigError(
                    f"{error} Leave it out: {type(owner).__name__}'s save_hyperparameters(ignore=[...])."
                ) from error

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make modules (`configure_model`) on the cpu; on the meta device if `weights=` has their values."""
        is_empty = empty_init or "weights" in self._arguments
        with torch.device("meta") if is_empty else contextlib.nullcontext():
            yield

    def on_exception(self, exception: BaseException) -> None:
        """Note that a run failed: other ranks may not come to its end."""
        super().on_exception(exception)
        self._failed = True

    def teardown(self) -> None:
        """Close the optimizer, so that the module has whole parameters. After an exception, on a single rank."""
        handle, self._handle = self._handle, None
        if handle is not None and not self._failed:
            handle.close(keep_params=self._keep_params)
        elif handle is not None and self.world_size == 1:
            try:
                handle.close(keep_params=self._keep_params)
            except Exception as error:  # the one that ended the run is the one to be read
                rank_zero_warn(f"The module's parameters could not be given back: {error}")
        module = self.lightning_module
        if module is not None and any(p.is_meta for p in module.parameters()):
            self._lightning_module = None  # Lightning would move it to the cpu, and there is nothing to move
        super().teardown()
        self._lightning_module = module

    # Forward and backward

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step`, as a forward of it if Lightning runs backward after it."""
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            return self.lightning_module.training_step(*args, **kwargs)
        return self._run("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `validation_step` as a forward of it."""
        return self._run("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `test_step` as a forward of it."""
        return self._run("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `predict_step` as a forward of it."""
        return self._run("predict_step", args, kwargs)

    def _run(self, name: str, args: Any, kwargs: Any) -> Any:
        """Run a method of the module inside a forward, in which parameters that it reads are gathered.

        The forward has no arguments: the method's inputs are the user's own, and only those of modules are cast.
        """
        module: Any = self.lightning_module
        method = getattr(module, name)
        before = module.__dict__.pop("forward", None)  # a compiler's

        def forward() -> Any:
            put_back()  # the method may call the module itself
            return method(*args, **kwargs)

        def put_back() -> None:
            module.__dict__.pop("forward", None)
            if before is not None:
                module.forward = before

        module.forward = forward
        try:
            return module()
        finally:
            put_back()

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward of a loss; with manual optimisation in fp16 that of the optimizer."""
        if optimizer is None and self.optimizers:
            optimizer = self.optimizers[0]
        loss: Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
        return loss

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Sum micro-batches on this rank inside a `with` block."""
        with self._handle.no_sync() if self._handle is not None and self.optimizers else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def gathered(self, *, modify: bool = False) -> Iterator[None]:
        """Gather the module's parameters inside a `with` block, on every rank: to generate, or for `state_dict`.

        Arguments:
            modify: whether to keep the changes that the first rank made to them.

        Example:
            >>> with self.trainer.strategy.gathered():  # doctest: +SKIP
            ...     answers = self.model.generate(batch)
        """
        with contextlib.nullcontext() if self._handle is None else self._handle.gathered(modify=modify):
            yield

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: checkpoints are loaded once the module is prepared."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: optimizer states come with the weights."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Gather the module's weights in the host memory of the first rank. Collective.

        Returns:
            Its state dict, parameters in fp32; empty on other ranks, and with `state_dict_type="sharded"`.
        """
        module = self.lightning_module
        assert module is not None
        if self._handle is None:
            state: dict[str, Any] = module.state_dict()
            return state
        if self._sharded:
            return {}
        masters = {p for p in module.parameters() if p.is_floating_point()}
        return gather_entries(state_entries(module), self._handle, keep=self.is_global_zero, masters=masters)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: the optimizer's state is in the folder."""
        del optimizer
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint as a folder; one of weights alone as Lightning's file. Collective.

        Raises:
            ConfigError: `storage_options`; or the checkpoint holds what only a pickle could. Nothing was written.
            CheckpointError: something could not be written.
        """
        if storage_options is not None:
            raise ConfigError("save_checkpoint(storage_options=): checkpoints are folders on a disk. Leave it out.")
        path = Path(self.broadcast(filepath))
        trains = bool(self.optimizers) and "optimizer_states" in checkpoint
        if self._handle is not None and trains:
            module = self.lightning_module
            assert module is not None
            checkpoints.save(path, module, self._handle, checkpoint, is_first_rank=self.is_global_zero)
            return
        if self._handle is not None and self._sharded:
            raise _weights_alone()
        if trains:
            rank_zero_warn(
                f"{path} gets weights alone: the state of the optimizer went with the end of fit(). To resume, save "
                "inside of it, such as by ModelCheckpoint(save_last=True)."
            )
            checkpoint = {k: v for k, v in checkpoint.items() if k not in ("optimizer_states", "lr_schedulers")}
        if self.is_global_zero:
            if path.is_dir():
                checkpoints.remove_checkpoint(path, self.checkpoint_io)
            self.checkpoint_io.save_checkpoint(checkpoint, path)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder into the prepared module; read a file of Lightning's, by tensors and plain values. Collective.

        Raises:
            CheckpointError: it is damaged, of another model, or holds something else.
        """
        del weights_only  # never anything else
        assert self._handle is not None
        path = Path(self.broadcast(checkpoint_path))
        if checkpoints.is_folder(path):
            return checkpoints.load(path, self._handle)
        return checkpoints.read_file(path, self.checkpoint_io)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Write the weights of a file, and its optimizer state if it has one; a folder's are there already."""
        if "state_dict" not in checkpoint:
            return
        assert self._handle is not None
        assert self.lightning_module is not None
        put_state(self.lightning_module, self._handle, checkpoint["state_dict"], strict=strict)
        for optimizer, state in zip(self.optimizers, checkpoint.get("optimizer_states", ()), strict=False):
            unwrapped(optimizer).load_state_dict(state)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: optimizer states came with the weights."""

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, of a folder the files of a save."""
        if self.is_global_zero:
            checkpoints.remove_checkpoint(Path(filepath), self.checkpoint_io)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register nothing by itself: the package does."""


def _weights_alone() -> ConfigError:
    """Make the error of saving weights alone where they are never gathered; the caller raises it."""
    return ConfigError(
        "save_weights_only with state_dict_type='sharded': a file of weights alone needs all of them in host memory. "
        "Save whole checkpoints and penstock.export() one, or use state_dict_type='full'."
    )
