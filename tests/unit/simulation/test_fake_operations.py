"""What runs on fake tensors, what does not, what is counted, and what is refused."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from penstock.errors import ConfigError
from penstock.planner.simulation.fake_operations import FakeOperations
from penstock.planner.simulation.fake_tensor import fake_tensor, is_fake
from penstock.planner.simulation.model_copy import copy_model
from tests.simulating import differences, for_real, simulated


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)))


class Ranked(nn.Module):
    """Layers of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4)
        self.bag, self.table = nn.EmbeddingBag(10, 6, mode="mean"), nn.Embedding(10, 6)
        self.rnn, self.last = nn.GRU(6, 6, batch_first=True), nn.LayerNorm(6)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        seen = self.norm(self.conv(x)).relu().mean()
        return self.last(self.rnn(self.table(ids))[0]).sum() + self.bag(ids).sum() * seen + seen.float().square()


def checkpointed(reentrant: bool):
    def work(model: nn.Module) -> None:
        x = torch.ones(4, 16, requires_grad=True)
        for block in model:
            x = checkpoint(block, x, use_reentrant=reentrant)
        x.square().mean().backward()

    return work


def own_gradients(model: nn.Module) -> None:
    x = torch.ones(4, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()


def saved_elsewhere(model: nn.Module) -> None:
    with save_on_cpu():
        model(torch.ones(4, 16)).sum().backward()


def in_autocast(model: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.ones(4, 16)).float().pow(2).mean()
    loss.backward()


def with_hooks(model: nn.Module) -> None:
    seen: list[Tensor] = []
    model[1].register_full_backward_hook(lambda _, given, got: seen.extend(got))
    model[1].register_forward_hook(lambda _, args, out: out * 2)
    model(torch.ones(4, 16)).sum().backward()
    assert [part.shape for part in seen] == [(4, 16)]


WORKS = {
    "plain": (blocks, lambda model: model(torch.ones(4, 16)).sum().backward()),
    "many kinds": (Ranked, lambda model: model(torch.ones(2, 3, 9, 9), torch.arange(6).view(2, 3)).backward()),
    "reentrant": (blocks, checkpointed(True)),
    "not reentrant": (blocks, checkpointed(False)),
    "gradient of a gradient": (blocks, own_gradients),
    "saved on the cpu": (blocks, saved_elsewhere),
    "autocast": (blocks, in_autocast),
    "hooks": (blocks, with_hooks),
}


@pytest.mark.parametrize(("make", "work"), WORKS.values(), ids=WORKS)
def test_what_is_simulated_is_what_is_done_for_real(make, work) -> None:
    assert list(differences(simulated(make, work), for_real(make, work))) == []


def test_compiled_modules_run_as_they_were_written() -> None:
    model = copy_model(blocks())

    def kernels(*_: object) -> None:
        raise AssertionError("nothing is to be compiled")

    compiled = torch.compile(model, backend=kernels)
    with FakeOperations() as mode:
        compiled(torch.ones(4, 16)).square().sum().backward()
    assert {op.name for op in mode.recipes} >= {"aten.addmm.default", "aten.gelu.default", "aten.gelu_backward.default"}
    assert all(is_fake(p.grad) for p in model.parameters())
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):  # outside, torch compiles as before
        torch.compile(nn.Linear(2, 2), backend=kernels)(torch.ones(1, 2))


def test_real_values_stay_real_while_they_are_small() -> None:
    with FakeOperations():
        mask = torch.ones(8, 8, dtype=torch.bool).tril()
        assert mask.sum().item() == 36
        assert not is_fake(mask)
        large = torch.zeros(1 << 20, 2)  # 8 MiB
        assert is_fake(large)
        assert not is_fake(torch.zeros_like(large[0])), "what it is like does not matter"
        assert not is_fake(torch.ones(1 << 20)), "4 MiB"
        assert is_fake(mask[0] + large[:8, 0])


def test_what_fake_values_are_written_to_is_unknown_and_not_touched() -> None:
    """Also the running statistics of a batch of them."""
    total, other, norm = torch.zeros(()), torch.zeros(4), nn.BatchNorm1d(4)
    with FakeOperations():
        total += fake_tensor((4,), torch.float32).sum()
        torch.add(fake_tensor((4,), torch.float32), 1, out=other)
        norm(fake_tensor((8, 4), torch.float32))
    assert all(map(is_fake, (total, other, norm.running_mean)))
    assert (total.item(), norm.num_batches_tracked.item()) == (0, 1)
    assert norm.running_mean.tolist() == [0, 0, 0, 0]


def test_random_numbers_are_not_drawn_for_fake_values() -> None:
    before = torch.get_rng_state()
    with FakeOperations():
        nn.functional.dropout(fake_tensor((8, 8), torch.float32), 0.5)
        torch.randn(1 << 21)
    assert torch.equal(torch.get_rng_state(), before)


def test_inference_mode_is_simulated_in_parts() -> None:
    model, seen = copy_model(blocks()), []
    with FakeOperations(seen.append), torch.inference_mode():
        out = model(torch.ones(2, 5, 16))
        nn.functional.scaled_dot_product_attention(*[fake_tensor((1, 2, 4, 8), torch.float32) for _ in range(3)])
    assert out.shape == (2, 5, 16)
    assert is_fake(out)
    names = [op.name for op in seen]
    assert names.count("aten.addmm.default") == 6
    assert names[-1] == "aten._scaled_dot_product_flash_attention_for_cpu.default"


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("aten._local_scalar_dense.default", lambda x: x.sum().item()),
        ("aten.nonzero.default", lambda x: x.nonzero()),
        ("aten.equal.default", lambda x: torch.equal(x, x + 1)),
    ],
)
def test_what_depends_on_values_is_refused_in_one_line(name: str, ask) -> None:
    with FakeOperations(module=lambda: "layers.3.mlp"), pytest.raises(ConfigError) as refused:
        ask(fake_tensor((8,), torch.float32))
    assert str(refused.value).startswith(f"simulation: {name} in module 'layers.3.mlp' ")
    assert str(refused.value).endswith("run `penstock plan --measure`, which takes two real steps instead")
    assert "\n" not in str(refused.value)


def test_an_operation_without_a_rule_for_shapes_is_refused() -> None:
    with torch.library._scoped_library("fake_test", "FRAGMENT") as library:
        library.define("odd(Tensor x) -> Tensor")
        library.impl("odd", lambda x: x.flip(0), "CPU")
        with FakeOperations():
            assert torch.ops.fake_test.odd(torch.arange(3)).tolist() == [2, 1, 0], "of real values it runs"
            with pytest.raises(
                ConfigError, match=r"fake_test\.odd\.default has no rule for shapes in torch .*--measure"
            ):
                torch.ops.fake_test.odd(fake_tensor((3,), torch.float32))


def test_real_sparse_tensors_stay_real_and_sparse_gradients_are_refused() -> None:
    table = copy_model(nn.Embedding(10, 4, sparse=True))
    with FakeOperations():
        assert (torch.eye(3).to_sparse() @ torch.ones(3, 2)).tolist() == torch.ones(3, 2).tolist()
        with pytest.raises(ConfigError, match=r"layout torch\.sparse_coo"):
            table(fake_tensor((3,), torch.int64)).sum().backward()


def test_a_function_in_place_of_a_forward_calls_the_copy() -> None:
    model = nn.Linear(4, 4)
    method, seen = model.forward, []

    def scaled(x: Tensor) -> Tensor:
        return method(x) * 2

    def around(x: Tensor) -> Tensor:
        seen.append(model)
        return scaled(x) if x.numel() else around(x)

    model.forward = around
    copied = copy_model(model)
    with FakeOperations():
        assert is_fake(copied(torch.ones(2, 4)))
    assert seen == [copied]
    assert model.forward is around
    assert not is_fake(model(torch.ones(2, 4)))
