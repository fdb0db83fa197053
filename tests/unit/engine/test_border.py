"""Whatever the user's thread is in, our side of the border computes the same, on tensors of the right kind."""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import penstock
from penstock.runtime.streams import Streams
from tests.lib.engines import ON_CPU, ON_NVME, adamw, loss_of, prepare_on, prepared
from tests.lib.memory import disks
from tests.lib.models import Blocks, batch_of
from tests.lib.streams import separate, simulated

WIDTH = 8


def refuse(func: Any, args: Any, kwargs: Any) -> Any:
    """No operation of ours is a mode's business; torch itself tells its profiler of every `step`."""
    assert "profiler" in str(func), f"{func} was seen by a mode of the user's"
    return func(*args, **(kwargs or {}))


class NoDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return refuse(func, args, kwargs)


class NoFunction(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return refuse(func, args, kwargs)


@contextlib.contextmanager
def default(setter: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


Work = Callable[[], Any]
Within = Callable[[Work], Any]


def inside(make: Callable[[], Any]) -> Within:
    def run(work: Work) -> Any:
        with make():
            return work()

    return run


def under(transform: Callable[..., Any], end: Callable[[Tensor], Tensor]) -> Within:
    def run(work: Work) -> Any:
        found = []

        def function(x: Tensor) -> Tensor:
            found.append(work())
            return end(x)

        transform(function)(torch.ones(2))
        return found[0]

    return run


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """All that a thread may be set to: whichever of them reached our side would change a result, or refuse."""
    with (
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        default(torch.set_default_device, "meta", None),
        default(torch.set_default_dtype, torch.float64, torch.float32),
    ):
        yield


@contextlib.contextmanager
def modes() -> Iterator[None]:
    with torch.no_grad(), NoDispatch(), NoFunction():
        yield


MODES: dict[str, Within] = {
    "settings": inside(settings),
    "modes": inside(modes),
    "torch.func.grad": under(torch.func.grad, torch.sum),
    "torch.func.vmap": under(torch.func.vmap, torch.neg),
}


class Run:
    """One model in training, and what an operation may need."""

    def __init__(self, make: Callable[[], Streams], folder: Path, within: Within, storages: dict[str, Any]) -> None:
        self.folder = folder
        self.model = Blocks(width=WIDTH)
        stock = adamw(self.model.parameters())
        streams, placement = make(), penstock.Placement(**storages, nvme_path=disks())
        self.optimizer = within(lambda: prepare_on(streams, self.model, stock, placement=placement))
        self.given = torch.linspace(-1, 1, WIDTH * WIDTH * 2).view(2 * WIDTH, WIDTH)

    @property
    def parameter(self) -> nn.Parameter:
        return self.model.blocks[1].up.weight

    def backward(self) -> Tensor:
        loss = loss_of(self.model)
        self.optimizer.backward(loss)
        return loss.detach()

    def train(self) -> list[Any]:
        loss = self.backward()
        norm = self.optimizer.step().grad_norm
        self.optimizer.zero_grad()
        return [loss, norm]

    def infer(self) -> Tensor:
        with torch.inference_mode():
            return self.model(batch_of(self.model))

    def state(self) -> list[Tensor]:
        return [self.optimizer.full_param(p) for p in self.model.parameters()]


def save_and_load(run: Run) -> Any:
    run.optimizer.save(run.folder / "one", extra={"kept": run.given})
    return run.optimizer.load(run.folder / "one")


def save_beside(run: Run) -> Any:
    run.optimizer.save(run.folder / "two", blocking=False)
    run.optimizer.synchronize()


def gathered(run: Run, parameters: Any, *, modify: bool) -> Any:
    with run.optimizer.gathered(parameters, modify=modify):
        pass


def moves(run: Run, to: Any) -> Any:
    run.optimizer.offload_states(to=to)
    run.optimizer.reload_states()


def set_everything(run: Run) -> Any:
    run.optimizer.set_full_param(run.parameter, run.given)
    run.optimizer.set_full_state(run.parameter, "exp_avg", run.given)
    run.optimizer.set_full_grad(run.parameter, run.given)


OPERATIONS: dict[str, Callable[[Run], Any]] = {
    "step": lambda run: run.optimizer.step().grad_norm,
    "zero_grad": lambda run: run.optimizer.zero_grad(),
    "clip_grad_norm_": lambda run: run.optimizer.clip_grad_norm_(0.1),
    "clip_grad_norm_ of inf": lambda run: run.optimizer.clip_grad_norm_(0.1, float("inf")),
    "full_param": lambda run: run.optimizer.full_param(run.parameter),
    "full_grad": lambda run: run.optimizer.full_grad(run.parameter),
    "full_grad of none": lambda run: (run.optimizer.zero_grad(), run.optimizer.full_grad(run.parameter))[1],
    "full_state": lambda run: [run.optimizer.full_state(run.parameter, name) for name in ("exp_avg", "step")],
    "set": set_everything,
    "state_dict": lambda run: run.optimizer.state_dict()["state"],
    "load_state_dict": lambda run: run.optimizer.load_state_dict(run.packed),
    "offload to cpu": lambda run: moves(run, "cpu"),
    "offload to nvme": lambda run: moves(run, "nvme"),
    "save, load": save_and_load,
    "save beside": save_beside,
    "gathered": lambda run: gathered(run, None, modify=False),
    "gathered, modify": lambda run: gathered(run, [run.parameter], modify=True),
    "locations": lambda run: [row.nbytes for row in run.optimizer.locations().rows],
    "synchronize": lambda run: run.optimizer.synchronize(),
}


def flat(value: Any) -> Any:
    found = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    for tensor in found:
        assert tensor.device.type == "cpu"
        assert not tensor.is_inference()
        assert not tensor.requires_grad
    return found or value


def story(make: Callable[[], Streams], folder: Path, within: Within, storages: dict[str, Any]) -> dict[str, Any]:
    """All operations within a mode, each between backward and step; what each gave, and what came of it."""
    run = Run(make, folder, within, storages)
    told: dict[str, Any] = {"at first": run.train()}
    for name, operation in OPERATIONS.items():
        run.packed = run.optimizer.state_dict() if name == "load_state_dict" else None
        told[f"before {name}"] = run.backward()
        told[name] = flat(within(functools.partial(operation, run)))
        told[f"after {name}"] = [run.infer().clone(), run.optimizer.step().grad_norm]
        run.optimizer.zero_grad()
    run.optimizer.offload_states()
    told["offloaded"] = run.infer().clone()
    run.optimizer.reload_states()
    told["in the end"] = [*run.train(), *run.state()]
    within(run.optimizer.close)
    told["closed"] = [p.detach() for p in run.model.parameters()]
    assert not any(p.is_inference() for p in run.model.parameters())
    return told


PLACES: dict[str, tuple[Callable[[], Streams], dict[str, Any]]] = {
    "device": (simulated, {}),
    "cpu": (separate, ON_CPU),
    "nvme": (separate, ON_NVME),
}


def directly(work: Work) -> Any:
    return work()


@functools.cache
def expected(place: str) -> dict[str, Any]:
    make, storages = PLACES[place]
    with tempfile.TemporaryDirectory() as folder:
        return story(make, Path(folder), directly, storages)


@pytest.mark.parametrize(("place", "mode"), [*(("nvme", mode) for mode in MODES), ("device", "modes")])
def test_what_the_users_thread_is_in_stays_on_his_side(place: str, mode: str, tmp_path: Path) -> None:
    make, storages = PLACES[place]
    found = story(make, tmp_path, MODES[mode], storages)
    for name, value in expected(place).items():
        told = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True, msg=told)


class Counting(TorchDispatchMode):
    """The operations that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_models_operations_alone() -> None:
    """As a counter of FLOPs, or selective checkpointing, which hands out again what it has seen in order."""
    seen = []
    for is_plain in (True, False):
        model = Blocks(width=WIDTH)
        if not is_plain:
            prepared(model, **ON_CPU)
        with Counting() as mode:
            loss_of(model).backward()
        seen.append(mode.names)
    theirs, ours = ([name for name in names if "detach" not in name] for names in seen)
    assert ours == theirs


def test_an_export_is_the_same_in_every_mode(tmp_path: Path) -> None:
    run = Run(separate, tmp_path, directly, ON_CPU)
    run.optimizer.save(tmp_path / "one")
    run.optimizer.close()
    penstock.export(tmp_path / "one", tmp_path / "plain")
    for mode, within in MODES.items():
        within(functools.partial(penstock.export, tmp_path / "one", tmp_path / mode))
        for file in (tmp_path / "plain").iterdir():
            assert (tmp_path / mode / file.name).read_bytes() == file.read_bytes(), mode


def test_the_block_of_gathered_and_a_closed_border_are_the_users(tmp_path: Path) -> None:
    run = Run(separate, tmp_path, directly, ON_CPU)

    def state() -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.empty(1).device.type,
        )

    with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
        before = state()
        with run.optimizer.gathered():
            assert state() == before == (False, True, True, "meta")
        assert state() == before
    with run.optimizer.gathered():
        assert state() == (True, False, False, "cpu")
    with pytest.raises(penstock.ConfigError), run.optimizer.gathered([nn.Parameter(torch.ones(1))]):
        pass
    assert state() == (True, False, False, "cpu")


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    with pytest.raises(penstock.ConfigError, match=r"'weight' was made in torch\.inference_mode"):
        penstock.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
