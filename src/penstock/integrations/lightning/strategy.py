"""What a Trainer takes: `Trainer(strategy=PenstockStrategy(placement=...))`, or `strategy="penstock"`."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers, _MockOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

import penstock
from penstock.errors import ConfigError
from penstock.integrations.lightning import checkpoints
from penstock.integrations.lightning.precision import PenstockPrecision, bare, checked, compute_of
from penstock.integrations.lightning.prepared import Prepared, divide_arguments, meta_where
from penstock.integrations.lightning.refusals import check_trainer, weights_alone


class PenstockStrategy(DDPStrategy):
    """Trains a LightningModule that `penstock.prepare` has sharded and placed. Processes start as those of DDP do.

    Its optimizers are prepared when a fit begins; at its end they are closed, and the module has whole parameters. What
    evaluates (`validate`, `test`, `predict`) runs `prepare(module, None)`. Checkpoints are folders; those of weights
    alone are Lightning's files.

    Arguments:
        precision_plugin: a `PenstockPrecision`; `None` for what the Trainer's `precision=` says.
        state_dict_type: `"full"` collects whole weights in host memory of the first rank for each checkpoint, so that
            hooks see them and `save_weights_only` works. `"sharded"` never does: for models larger than that memory.
        keep_params: whether the module has whole parameters after a run; `False` leaves them empty.
        arguments: those of `penstock.prepare`, by their types or as files hold them, and of `DDPStrategy` how processes
            start (`process_group_backend`, `timeout`, `start_method`, `cluster_environment`). `precision` may be left
            to the Trainer.

    Raises:
        ConfigError: `precision` is not what the Trainer was given. What else cannot be had is said when a run begins,
            before anything changes.

    Attributes:
        step_result: what the last optimizer step returned, such as its `grad_norm`; `None` before the first.

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
        launch, self._arguments = divide_arguments(arguments)
        self._wanted = self._arguments.pop("precision", None)
        if self._wanted is not None:
            checked(self._wanted)
        self._sharded = state_dict_type == "sharded"
        self._keep_params = keep_params
        self._prepared: Prepared | None = None
        self._failed = False
        super().__init__(precision_plugin=precision_plugin, **launch)

    # Precision

    @property
    def precision_plugin(self) -> PenstockPrecision:
        """What maps precisions and clips."""
        if self._precision_plugin is None:
            return PenstockPrecision(self._wanted or "fp32")
        plugin: PenstockPrecision = self._precision_plugin
        return plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is None:
            self._precision_plugin = None
            return
        compute = compute_of(plugin, self._wanted)
        self._precision_plugin = plugin if isinstance(plugin, PenstockPrecision) else PenstockPrecision(compute)

    @property
    def step_result(self) -> penstock.StepResult | None:
        """What the last optimizer step returned."""
        return self.precision_plugin.step_result

    # Begin and end

    def setup(self, trainer: Any) -> None:
        """Prepare the module, with its optimizers where it is fitted. Collective.

        Raises:
            ConfigError: the Trainer asks for what cannot be had; names it. Nothing has changed.
        """
        assert self.accelerator is not None
        self._failed = False
        check_trainer(trainer, self._arguments, sharded=self._sharded)
        if self.world_size == 1:
            # Lightning divides the loaders of every DDPStrategy, and shuffles those of training, also for one rank.
            trainer._accelerator_connector.use_distributed_sampler = False
        self.accelerator.setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            if self._layer_sync:
                self.model = self._layer_sync.apply(self.lightning_module)
            self.setup_optimizers(trainer)
        else:
            self._reset_optimizers_and_schedulers()
            self._prepare([])

    def setup_optimizers(self, trainer: Any) -> None:
        """Have the module make its optimizers, and prepare them. Schedulers stay those of the module's optimizers.

        Raises:
            ConfigError: there is none, or several share a submodule.
        """
        self._reset_optimizers_and_schedulers()
        optimizers, self.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(self.lightning_module)
        if any(isinstance(optimizer, _MockOptimizer) for optimizer in optimizers):
            raise ConfigError("configure_optimizers() returned no optimizer: the strategy 'penstock' trains by one.")
        self.optimizers = self._prepare(optimizers).optimizers

    def _prepare(self, optimizers: list[Any]) -> Prepared:
        """Prepare the module, for training by these optimizers, or for inference."""
        assert self.lightning_module is not None
        self.lightning_module.zero_grad()  # as Lightning does before a run, a moment later
        self._prepared = Prepared(
            self.lightning_module,
            optimizers,
            device=self.root_device,
            precision=self.precision_plugin.compute,
            arguments=self._arguments,
        )
        return self._prepared

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make modules (`configure_model`) on the cpu; on the meta device where `weights=` says what is in them."""
        with meta_where(empty_init, self._arguments):
            yield

    def on_exception(self, exception: BaseException) -> None:
        """Remember that a run failed: other ranks may not come to its end."""
        super().on_exception(exception)
        self._failed = True

    def teardown(self) -> None:
        """Close what was prepared, so that the module has whole parameters. After an exception, on a single rank."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and not self._failed:
            prepared.close(keep_params=self._keep_params)
        elif prepared is not None and self.world_size == 1:
            try:
                prepared.close(keep_params=self._keep_params)
            except Exception as error:  # the one that ended the run is the one to be read
                rank_zero_warn(f"The module's parameters could not be given back: {error}")
        module = self.lightning_module
        if module is not None and any(p.is_meta for p in module.parameters()):
            self._lightning_module = None  # Lightning would move it to the cpu, and there is nothing to move
        super().teardown()
        self._lightning_module = module

    # Forward, backward, step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step`, as a forward of it where Lightning runs backward after it."""
        assert self.lightning_module is not None
        return self._run("training_step", args, kwargs, whole=self.lightning_module.automatic_optimization)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `validation_step` as a forward of it."""
        return self._run("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `test_step` as a forward of it."""
        return self._run("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `predict_step` as a forward of it."""
        return self._run("predict_step", args, kwargs)

    def _run(self, name: str, args: Any, kwargs: Any, *, whole: bool = True) -> Any:
        """Run a method of the module inside a forward, in which parameters that it reads are gathered.

        The forward is given nothing: the method's inputs are the user's own, and only those of modules are cast.
        """
        module: Any = self.lightning_module
        method = getattr(module, name)
        if not whole or self._prepared is None or not self._prepared.is_whole:
            return method(*args, **kwargs)
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
        """Run the backward of a loss; with manual optimisation in fp16 that of the one optimizer."""
        if optimizer is None and self.optimizers:
            optimizer = self.optimizers[0]
        loss: Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
        return loss

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Sum micro-batches on this rank inside a `with` block."""
        with self._prepared.no_sync() if self._prepared else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def gathered(self, *, modify: bool = False) -> Iterator[None]:
        """Show the module's whole parameters inside a `with` block, on every rank: to generate, or for `state_dict`.

        Arguments:
            modify: whether to take over what the first rank wrote into them.

        Example:
            >>> with self.trainer.strategy.gathered():  # doctest: +SKIP
            ...     answers = self.model.generate(batch)
        """
        with self._prepared.gathered(modify=modify) if self._prepared else contextlib.nullcontext():
            yield

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether checkpoints are loaded once the module is prepared."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning loads optimizer states: they come with the weights."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Gather the module's weights, one after the other, in the host memory of the first rank. Collective.

        Returns:
            Its state dict, parameters in fp32; empty on other ranks, and with `state_dict_type="sharded"`.
        """
        assert self.lightning_module is not None
        if self._prepared is None:
            state: dict[str, Any] = self.lightning_module.state_dict()
            return state
        return {} if self._sharded else self._prepared.state(keep=self.is_global_zero)

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
        trains = "optimizer_states" in checkpoint
        if self._prepared is not None and trains and self.optimizers:
            checkpoints.save(path, self._prepared, checkpoint, is_first_rank=self.is_global_zero)
            return
        if self._prepared is not None and self._sharded:
            raise weights_alone()
        if trains and self.optimizers:
            rank_zero_warn(
                f"{path} gets weights alone: the state of the optimizer went with the end of fit(). To resume, save "
                "inside of it, such as by ModelCheckpoint(save_last=True)."
            )
            checkpoint = {k: v for k, v in checkpoint.items() if k not in ("optimizer_states", "lr_schedulers")}
        if self.is_global_zero:
            if path.is_dir():
                checkpoints.take_away(path, self.checkpoint_io)
            self.checkpoint_io.save_checkpoint(checkpoint, path)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder into what was prepared; read a file of Lightning's, by tensors and plain values. Collective.

        Raises:
            CheckpointError: it is damaged, of another model, or holds something else.
        """
        del weights_only  # never anything else
        assert self._prepared is not None
        path = Path(self.broadcast(checkpoint_path))
        if checkpoints.is_folder(path):
            return checkpoints.load(path, self._prepared)
        return checkpoints.read_file(path, self.checkpoint_io)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take over the weights of a file, and its optimizer states where it has some; a folder's are there already."""
        if "state_dict" not in checkpoint:
            return
        assert self._prepared is not None
        self._prepared.put(checkpoint["state_dict"], strict=strict)
        for optimizer, state in zip(self.optimizers, checkpoint.get("optimizer_states", ()), strict=False):
            bare(optimizer).load_state_dict(state)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: optimizer states came with the weights."""

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, of a folder what a save has written."""
        if self.is_global_zero:
            checkpoints.take_away(Path(filepath), self.checkpoint_io)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register nothing by itself: the package does."""
