"""Released parameters as people use them: what needs no values is answered, and nothing of the rest reads NaN."""

import copy
import operator
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.runtime.streams import Streams
from tests.lib.engines import prepared, sgd
from tests.lib.models import stack
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, is_released, released

WIDTH = 4
PLACES: dict[str, tuple[Callable[[], Streams], dict[str, str]]] = {
    "cpu": (released, {"params": "cpu"}),
    "nvme": (inline, {"params": "nvme"}),
}
Prepare = Callable[[nn.Module], penstock.Optimizer]


@pytest.fixture(params=PLACES)
def prepare(request: pytest.FixtureRequest) -> Prepare:
    streams, where = PLACES[request.param]
    return lambda model: prepared(model, streams, stock=sgd, units=(nn.Linear,), **where)[1]


def net() -> nn.Sequential:
    return stack(width=WIDTH)


@torch.no_grad()
def written(p: Tensor, write: Callable[[Tensor], object]) -> None:
    write(p)


def set_data(p: Tensor) -> None:
    p.data = torch.zeros(WIDTH, WIDTH)


#: What needs values. All of it read NaN, or gave an error of torch's about memory.
REFUSED: dict[str, Callable[[Tensor], object]] = {
    "lerp_ of an average": lambda p: torch.zeros(WIDTH, WIDTH).lerp_(p, 0.5),
    "foreach": lambda p: torch._foreach_sub([torch.zeros(WIDTH, WIDTH)], [p]),
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "copy_ from it": lambda p: torch.zeros(WIDTH, WIDTH).copy_(p),
    "parameters_to_vector": lambda p: torch.nn.utils.parameters_to_vector([p]),
    "vector_to_parameters": lambda p: torch.nn.utils.vector_to_parameters(torch.zeros(WIDTH * WIDTH), [p]),
    "item": lambda p: p[0, 0],
    "T": lambda p: p.T,
    "equal": lambda p: torch.equal(p, p),
    "==": lambda p: p == 1,
    "bool": lambda p: bool(p),
    "linear": lambda p: nn.functional.linear(torch.ones(1, WIDTH), p),
    "out=": lambda p: torch.add(p.data, 1, out=p.data),
    "to": lambda p: p.to(torch.float64),
    "data_ptr": lambda p: p.data_ptr(),
    "untyped_storage": lambda p: p.untyped_storage(),
    "nn.Parameter of it": lambda p: nn.Parameter(p.data),
    "as_tensor": lambda p: torch.as_tensor(p) + 1,
    "deepcopy": copy.deepcopy,
    "copy.copy": copy.copy,
    "pickle": pickle.dumps,
    "copy_": lambda p: written(p, lambda p: p.copy_(torch.zeros(WIDTH, WIDTH))),
    "data.zero_": lambda p: p.data.zero_(),
    "data[:] =": lambda p: operator.setitem(p.data, slice(None), 0.0),
    "data =": set_data,
    "init": nn.init.zeros_,
    "requires no gradient": lambda p: written(p, lambda p: p.requires_grad_(False).add_(1)),
}

#: What needs none: as on a plain parameter.
ANSWERED: dict[str, Callable[[Tensor], object]] = {
    "shape": lambda p: p.shape,
    "size": lambda p: (p.size(), p.size(0), p.dim(), p.ndim, p.numel(), p.nelement(), len(p)),
    "strides": lambda p: (p.stride(), p.stride(0), p.is_contiguous(), p.dim_order()),
    "dtype": lambda p: (p.dtype, p.is_floating_point(), torch.is_floating_point(p), torch.is_complex(p), p.itemsize),
    "type": lambda p: p.type(),
    "bytes": lambda p: (p.nbytes, p.element_size(), p.numel() * p.element_size()),
    "device": lambda p: (p.device, p.is_cuda, p.is_meta, p.is_cpu, p.get_device()),
    "layout": lambda p: (p.layout, p.is_sparse, p.is_quantized, p.is_nested),
    "gradient": lambda p: (p.grad, p.requires_grad, p.is_leaf, p.grad_fn, p.output_nr, p.retains_grad),
    "kind": lambda p: (isinstance(p, nn.Parameter), torch.is_tensor(p), nn.parameter.is_lazy(p)),
    "set": lambda p: (p in {p}, {p: 1}[p], hash(p) == id(p), p is p),
    "likes": lambda p: (torch.zeros_like(p), p.new_zeros(2), torch.full_like(p, 2), type(torch.zeros_like(p))),
    "empty_like": lambda p: (torch.empty_like(p).shape, torch.empty_like(p).stride(), p.new_empty(3).dtype),
    "hook": lambda p: p.register_hook(lambda grad: grad).remove(),
    "post hook": lambda p: p.register_post_accumulate_grad_hook(lambda p: None).remove(),
    "requires_grad_": lambda p: p.requires_grad_(True).requires_grad,
    "data's": lambda p: (p.data.shape, p.data.numel(), p.data.nelement(), p.data.dtype, p.data.requires_grad),
    "attributes": lambda p: (setattr(p, "mine", 1), p.mine, delattr(p, "mine")),
    "grad": lambda p: (setattr(p, "grad", torch.ones_like(p)), p.grad, setattr(p, "grad", None)),
    "dir": lambda p: "shape" in dir(p),
    "group": lambda p: torch.optim.SGD([p], lr=0.1).zero_grad(),
    "clipping": lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return all(map(same, one, other)) if isinstance(one, tuple) else one == other


def test_a_use_of_a_released_parameter_is_refused_by_name(prepare: Prepare) -> None:
    model = net()
    optimizer = prepare(model)
    text = r"parameter '0.weight' \(4, 4\).*which is released"
    wrong = {}
    for name, use in REFUSED.items():
        try:
            wrong[name] = use(model[0].weight)
        except penstock.EngineError as error:
            if not re.search(text, str(error)):
                wrong[name] = error
        except Exception as error:
            wrong[name] = error
    assert not wrong
    model[0].weight.requires_grad_(True)
    optimizer.backward(model(torch.ones(1, WIDTH)).sum())  # nothing of it was done by halves
    assert not optimizer.step().skipped


def test_what_needs_no_values_is_answered(prepare: Prepare) -> None:
    model = net()
    plain = copy.deepcopy(model)
    prepare(model)
    for name, use in ANSWERED.items():
        assert same(use(model[1].weight), use(plain[1].weight)), name


class ReadsList(nn.Module):
    """Reads parameters of its parts, which no look-up in a module tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()
        self.others = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.held = [layer.weight for layer in self.others]

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.held
        x = self.layers(x) @ a.t()
        return torch.stack([x, x * b.diagonal(), torch.addmm(x, x, c.data.clone())]).sum() + a.norm() + c.norm()


def losses(model: nn.Module, backward: Callable[[Tensor], None]) -> list[Tensor]:
    found = []
    for _ in range(2):
        loss = model(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH))
        backward(loss)
        found.append(loss.detach())
    return found


@pytest.mark.parametrize(("prepare", "compiled"), [("cpu", True), ("nvme", False)], indirect=["prepare"])
def test_a_parameter_that_a_forward_has_in_a_list_is_gathered(prepare: Prepare, compiled: bool) -> None:
    model = ReadsList()
    plain = copy.deepcopy(model)
    plain.held = [layer.weight for layer in plain.others]
    optimizer = prepare(model)
    called = torch.compile(model, backend="eager") if compiled else model
    for one, other in zip(losses(called, optimizer.backward), losses(plain, Tensor.backward), strict=True):
        assert torch.equal(one, other)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        expected = torch.zeros_like(other) if other.grad is None else other.grad
        assert torch.equal(optimizer.full_grad(parameter), expected)
    assert is_released(model.others[0].weight)


def test_a_thread_beside_a_forward_does_not_gather(prepare: Prepare) -> None:
    model = net()
    prepare(model)
    said: list[str] = []

    def read(*_: Any) -> None:
        def elsewhere() -> None:
            try:
                model[2].weight.sum()
            except penstock.EngineError as error:
                said.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    model[0].register_forward_hook(read)
    model(torch.ones(1, WIDTH))
    assert len(said) == 1
    assert "is released" in said[0]


class Own(nn.Parameter):
    """A parameter class of somebody's."""

    scale = 3


def test_a_parameter_has_its_own_class_wherever_it_is_there(prepare: Prepare) -> None:
    model = net()
    model[1].weight = Own(model[1].weight.detach())
    kinds = [type(p) for p in model.parameters()]
    seen: list[list[type]] = []
    model[1].register_forward_hook(lambda *_: seen.append([type(p) for p in model[1].parameters()]))
    optimizer = prepare(model)
    shown = repr(model[1].weight)
    assert "ReleasedOwn" in str(type(model[1].weight))
    assert shown == f"{model[1].weight}"
    assert "released parameter '1.weight' (4, 4), torch.float32 on cpu" in shown
    assert isinstance(model[1].weight, Own)
    assert model[1].weight.scale == 3
    data = model[1].weight.data
    optimizer.backward(model(torch.ones(1, WIDTH)).sum())
    optimizer.step()
    assert seen == [kinds[2:4]]
    with optimizer.gathered():
        assert [type(p) for p in model.parameters()] == kinds
        with pytest.raises(penstock.EngineError, match=r"'1.weight'.*is released"):
            data.sum()  # was made of it before
    assert all(is_released(p) for p in model.parameters())
    optimizer.close()
    assert [type(p) for p in model.parameters()] == kinds
    assert [vars(p) for p in model.parameters()] == [{}] * len(kinds)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def _divided(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    optimizer = penstock.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        units=(nn.Linear,),
        precision="fp32",
        mesh=mesh,
        options=penstock.Options(debug_release=True),
    )
    weight = model[0].weight
    assert isinstance(weight, DTensor)
    assert (weight.shape, weight.placements[0].is_shard()) == ((8, 8), True)
    for use in (
        lambda: weight.sum(),
        lambda: weight.to_local(),
        lambda: weight.full_tensor().sum(),
        lambda: torch.lerp(weight, weight, 0.5),
        lambda: weight.data.sum(),
    ):
        with pytest.raises(penstock.EngineError, match=r"'0.weight'.*is released"):
            use()
    optimizer.backward(model(torch.ones(1, 8)).sum())
    assert not optimizer.step().skipped
    with optimizer.gathered():
        assert type(weight) is DTensor
        assert bool(weight.full_tensor().isfinite().all())
    optimizer.close()
    assert type(weight) is DTensor


def test_a_dtensor_that_is_released_is_refused_by_name() -> None:
    run_ranks(_divided, 2)
