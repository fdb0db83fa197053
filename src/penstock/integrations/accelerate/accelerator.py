"""accelerate's `Accelerator` whose models are prepared by Penstock: its public methods, overridden.

Subclassing public methods is what survives accelerate's releases: `DistributedType` is closed, and stays what it
computes.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, compile_regions, is_compiled_module
from torch import Tensor, nn
from torch.optim import Optimizer

import penstock
from penstock.errors import ConfigError, EngineError, no_gradient
from penstock.integrations.accelerate import pairs, saving, settings
from penstock.integrations.accelerate.pairs import Pair, PreparedOptimizer
from penstock.integrations.arguments import prepare_arguments
from penstock.integrations.weights import gather_entries, nvme_folders, state_entries


class PenstockAccelerator(Accelerator):
    """An `Accelerator` that trains models larger than the memory of the GPU: the loop stays as it is.

    Arguments:
        args, kwargs: as for `Accelerator`.
        penstock: arguments of `penstock.prepare`, as values or as files hold them (`prepare_arguments`). The precision
            is this one's, or `mixed_precision=`, or the launcher's; fp32 where nobody says one.

    Raises:
        ConfigError: an argument that there is not; two precisions; DeepSpeed, FSDP or the like beside Penstock.

    Example:
        >>> accelerator = PenstockAccelerator(penstock={"placement": {"optimizer": "cpu"}, "precision": "bf16"})
        ... # doctest: +SKIP
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
    """

    _models: list[nn.Module]
    _optimizers: list[PreparedOptimizer]
    _schedulers: list[Any]

    def __init__(self, *args: Any, penstock: Mapping[str, Any], **kwargs: Any) -> None:
        named = inspect.signature(Accelerator.__init__).bind(self, *args, **kwargs).arguments
        named.pop("self")
        self.prepare_arguments = prepare_arguments(penstock)
        settings.check_alone(named)
        said = settings.choose_precision(named, self.prepare_arguments)
        self._precision_was_said = said is not None
        self.prepare_arguments["precision"] = said or "fp32"
        named["mixed_precision"] = settings.PRECISIONS[said or "fp32"]
        # On a machine of cpus accelerate sees one rank alone, whatever the launcher says, unless it is told.
        named["cpu"] = named.get("cpu", False) or not torch.accelerator.is_available()
        self._pairs: list[Pair] = []
        super().__init__(**named)
        settings.check_machine(self.device, self.num_processes, self.prepare_arguments.get("mesh"))
        # Penstock casts and scales: no autocast around the model, and no GradScaler.
        self.native_amp = False
        self.scaler = None

    # Preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, dataloaders and schedulers, in any order; return them in that order. Collective.

        An optimizer is paired with the model that has its parameters. A model without one is sharded and placed for
        inference; prepared again with an optimizer, its pair before is closed first.

        Arguments:
            args: as for `Accelerator.prepare`.
            device_placement: as there, of dataloaders; models lie where the placement says.

        Raises:
            ConfigError: an optimizer of no model, or of several; a model that is wrapped or dispatched; whatever
                `penstock.prepare` refuses.
        """
        for thing in args:
            if type(thing).__name__ in ("DummyOptim", "DummyScheduler"):
                raise ConfigError(
                    f"prepare: {type(thing).__name__} stands for DeepSpeed's configuration. Give a torch.optim "
                    "optimizer and a scheduler over it."
                )
        models = [pairs.inner(thing) for thing in args if isinstance(thing, nn.Module)]
        optimizers = [pairs.given_to(thing) for thing in args if isinstance(thing, Optimizer)]
        self._pair(models, optimizers)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model without an optimizer, unless it has been prepared. Collective.

        Arguments:
            model: sharded and placed; never wrapped, and compiled where the accelerator has a `dynamo_plugin`.
            device_placement: not looked at: the placement says where it lies.
            evaluation_mode: not looked at: a model that has an optimizer stays with it.
        """
        del device_placement, evaluation_mode
        inner = pairs.inner(model)
        self._pair([inner], [])
        compiled = next((known for known in self._models if pairs.inner(known) is inner), None)
        prepared = compiled if compiled is not None else self._compiled(model)
        if prepared not in self._models:
            self._models.append(prepared)
        setattr(prepared, pairs.PREPARED, True)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        """Prepare an optimizer together with its model, which was given before or is in the same call. Collective.

        Arguments:
            optimizer: a stock torch optimizer.
            device_placement: not looked at: the placement says where its state lies.
        """
        del device_placement
        given = pairs.given_to(optimizer)
        self._pair([], [given])
        wrapper = next(pair.wrapper for pair in self._pairs if pair.given is given)
        assert wrapper is not None
        if wrapper not in self._optimizers:
            self._optimizers.append(wrapper)
        return wrapper

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wrap a scheduler, as accelerate does; a step that its optimizer skipped is not counted."""
        prepared = super().prepare_scheduler(scheduler)
        # accelerate looks for the optimizer that it wraps, which is ours, and takes all of them where there is none.
        over = getattr(prepared.scheduler, "optimizer", None)
        own = [w for w in self._optimizers if over in (w, w.optimizer, getattr(w, "given", None))]
        prepared.optimizers = own or prepared.optimizers
        return prepared

    def optimizer_of(self, model: nn.Module) -> penstock.Optimizer:
        """Return the `penstock.Optimizer` of a prepared model: its `gathered`, `locations`, `offload_states` and so on.

        Raises:
            ConfigError: the model was not prepared.
        """
        pair = self._find(model)
        if pair is None:
            raise ConfigError(
                f"{type(model).__name__} was not prepared by this accelerator. Give it to prepare() first."
            )
        return pair.handle

    def arguments_of(self, model: nn.Module) -> Mapping[str, Any]:
        """Return the arguments of `penstock.prepare` for a model: the same for all, unless a subclass knows better."""
        del model
        return self.prepare_arguments

    def _find(self, model: nn.Module) -> Pair | None:
        return next((pair for pair in self._pairs if pair.model is pairs.inner(model)), None)

    def _pair(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        """Prepare what is not yet, model and optimizer together. Collective."""
        for pair in [pair for pair in self._pairs if not pair.is_open]:  # the loop has closed it by itself
            self._close(pair)
        paired = [pair.given for pair in self._pairs]
        new = [optimizer for optimizer in dict.fromkeys(optimizers) if optimizer not in paired]
        matches = pairs.match(list(dict.fromkeys(models)), [pair.model for pair in self._pairs], new)
        known = {pair.model: pair for pair in self._pairs}
        wanted = [found for found in matches if found.model not in known or found.optimizer is not None]
        for found in wanted:
            pairs.check_model(found.model, self.device, chooses_precision=not self._precision_was_said)
        made: list[Pair] = []
        try:
            for found in wanted:
                if found.model in known:
                    models = self._models  # accelerate has it still
                    self._close(known[found.model])
                    self._models = models
                made.append(pairs.prepare_pair(found.model, found.optimizer, self.arguments_of(found.model)))
                saving.plant_save_pretrained(self, made[-1])
        except ConfigError:  # of all ranks: what one call gives is prepared together, or not
            for pair in made:
                pair.close()
            raise
        self._pairs += made

    def _close(self, pair: Pair) -> None:
        """Give back what a pair has, and drop it, with what accelerate keeps of it. Collective."""
        pair.close()
        self._pairs.remove(pair)
        self._models = [model for model in self._models if pairs.inner(model) is not pair.model]
        self._optimizers = [wrapper for wrapper in self._optimizers if wrapper is not pair.wrapper]
        self._schedulers = [s for s in self._schedulers if pair.wrapper is None or pair.wrapper not in s.optimizers]

    def _compiled(self, model: nn.Module) -> nn.Module:
        """Compile a prepared model where the accelerator was told to."""
        plugin = self.state.dynamo_plugin
        if plugin.backend == DynamoBackend.NO or is_compiled_module(model):
            return model
        compiling: Any = compile_regions if plugin.use_regional_compilation else torch.compile
        compiled: nn.Module = compiling(model, **plugin.to_kwargs())
        return compiled

    # Training

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Accumulate the gradients of a loss, divided by `gradient_accumulation_steps`.

        Arguments:
            loss: 0-dim tensor that a prepared model produced.
            kwargs: as for `torch.Tensor.backward`; in fp16 `retain_graph` alone.

        Raises:
            ConfigError: in fp16 with several trained models, each of which has a loss scale of its own.
            EngineError: the loss does not require a gradient, as of a model that was prepared without an optimizer.
        """
        loss = loss / self.gradient_accumulation_steps
        trained = [pair.handle for pair in self._pairs if pair.wrapper is not None]
        scaled = self.mixed_precision == "fp16"
        if scaled and len(trained) > 1:
            raise ConfigError(
                f"backward: {len(trained)} models are trained in fp16, each with a loss scale of its own. Call "
                "accelerator.optimizer_of(model).backward(loss) of the one that the loss is for, or train in bf16."
            )
        if trained and (scaled or (len(trained) == 1 and not kwargs.keys() - {"retain_graph"})):
            trained[0].backward(loss, **kwargs)
        elif not loss.requires_grad:
            raise no_gradient()
        else:
            # It reaches all models that it went through.
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Sum micro-batches on this rank inside a `with` block, where the stage allows it (0 and 1)."""
        pair = self._find(model)
        with nullcontext() if pair is None or pair.wrapper is None else pair.handle.no_sync():
            yield

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float | str = 2
    ) -> Tensor:
        """Clip the norm of a prepared model's gradient over all ranks; `step` applies it. Collective.

        Arguments:
            parameters: all that one optimizer trains; others of its model may be among them.
            max_norm: as for `torch.nn.utils.clip_grad_norm_`.
            norm_type: as there.

        Returns:
            The norm before clipping, 0-dim, on the accelerator's device.

        Raises:
            ConfigError: some of an optimizer's parameters without the others, or those of several.
            EngineError: more micro-batches follow: guard it with `if accelerator.sync_gradients:`.
        """
        wanted = dict.fromkeys([parameters] if isinstance(parameters, Tensor) else parameters)
        pair = pairs.clipped(self._pairs, wanted)
        if pair is None:
            norm: Tensor = super().clip_grad_norm_(list(wanted), max_norm, norm_type)
            return norm
        if not self.sync_gradients:
            raise EngineError(
                "clip_grad_norm_ inside accumulate(), before the last micro-batch: the gradient is not whole. Guard "
                "it: if accelerator.sync_gradients: accelerator.clip_grad_norm_(...)."
            )
        return pair.handle.clip_grad_norm_(max_norm, norm_type).to(self.device)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip elements of gradients of modules that were not prepared.

        Raises:
            ConfigError: there are parameters of a prepared model: its gradients are sharded.
        """
        wanted = dict.fromkeys([parameters] if isinstance(parameters, Tensor) else parameters)
        if any(p in wanted for pair in self._pairs for p in pair.parameters()):
            raise ConfigError(
                "clip_grad_value_: gradients of a prepared model are sharded, and their elements are not clipped. Use "
                "accelerator.clip_grad_norm_."
            )
        super().clip_grad_value_(list(wanted), clip_value)

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Refuse uneven inputs at several ranks: all of them gather and reduce together.

        Raises:
            ConfigError: at more than one rank.
        """
        if self.num_processes > 1:
            raise ConfigError(
                "join_uneven_inputs: ranks gather parameters together, so each needs as many batches. Use "
                "DataLoaderConfiguration(even_batches=True), accelerate's default."
            )
        with super().join_uneven_inputs(joinables, even_batches):
            yield

    # Saving

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Gather a prepared model's state dict, batch by batch, on the host of the main process. Collective.

        For `model.save_pretrained(folder, state_dict=..., is_main_process=...)`. Where the placement names folders for
        nvme, values lie there and not in memory, so that a model larger than that can be saved in shards.

        Arguments:
            model: as `prepare` returned it.
            unwrap: as for `Accelerator.get_state_dict`.

        Returns:
            Whole values, in the dtypes that the model had before; an empty dict on the other ranks.
        """
        if self._find(model) is None:
            plain: dict[str, Any] = super().get_state_dict(model, unwrap=unwrap)
            return plain
        entries = state_entries(self.unwrap_model(model) if unwrap else model)
        return self.gather_entries(model, entries, keep=saving.saves(self))

    def gather_entries(self, model: nn.Module, entries: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
        """Gather entries of a prepared model's state dict on the host, as `get_state_dict` does. Collective.

        Arguments:
            model: as `prepare` returned it.
            entries: some or all of `penstock.integrations.weights.state_entries`, the same on every rank.
            keep: whether this rank gets the values; it gets an empty dict otherwise.
        """
        pair = self._find(model)
        assert pair is not None
        folders = nvme_folders(pair.handle, self.arguments_of(pair.model))
        return gather_entries(entries, pair.handle, keep=keep, folders=folders, masters=pair.masters)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save a model's weights as accelerate does, with one shard in memory at a time. Collective.

        Arguments:
            model: as `prepare` returned it.
            save_directory: the folder; made where it is missing.
            max_shard_size: the most bytes of a file, or text such as `"5GB"`.
            safe_serialization: safetensors; else torch's own format.
        """
        pair = self._find(model)
        if pair is None:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
        else:
            saving.write_model(
                self, self.unwrap_model(model), pair, Path(save_directory), max_shard_size, safe=safe_serialization
            )

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, *, blocking: bool = True
    ) -> Any:
        """Save everything that the loop needs to go on: models as checkpoints of Penstock, the rest as accelerate's.

        Arguments:
            output_dir: as for `Accelerator.save_state`; models are in its folders `penstock`, `penstock_1` and so on.
            safe_serialization: not looked at: nothing of a model is pickled.
            blocking: `False` has models written beside training.
        """
        with saving.saving_states(self, self._pairs, blocking=blocking):
            return super().save_state(output_dir, safe_serialization)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, *, map_location: Any = None
    ) -> None:
        """Go on from what `save_state` has saved, at any world size, stage and placement. Collective.

        Arguments:
            input_dir: as for `Accelerator.load_state`.
            load_kwargs: as there, for what accelerate reads.
            map_location: likewise.

        Raises:
            CheckpointError: the folder holds other models, or is damaged.
        """
        with saving.loading_states(self, self._pairs):
            super().load_state(input_dir, load_kwargs, map_location=map_location)

    # The end

    def free_memory(self, *objects: Any) -> Any:
        """Close every pair, so that models have whole parameters again, and forget all objects. Collective.

        Moments go with it. For a model that does not fit, close by hand first:
        `accelerator.optimizer_of(model).close(keep_params=False)`.
        """
        for pair in list(self._pairs):
            self._close(pair)
        return super().free_memory(*objects)
