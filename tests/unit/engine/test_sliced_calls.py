"""`unit_micro_batches`: which arguments are cut, and what slices of a batch cannot be: each refused by name."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError, EngineError
from penstock.machine.streams import Streams
from tests.support import inline, prepare_on, separate, simulated

WIDTH, ROWS, STEPS = 8, 6, 5
ON_CPU = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
PLACES = [(inline, None), (separate, ON_CPU), (simulated, ON_CPU)]


class Stack(nn.Module):
    """Blocks in a row, each called with the same further arguments."""

    def __init__(self, make: Callable[[], nn.Module], blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(blocks))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, *args, **kwargs)
        return x


def made(make: Callable[[], nn.Module]) -> Stack:
    torch.manual_seed(0)
    return Stack(make)


def prepared(
    model: nn.Module, slices: int = 3, streams: Callable[[], Streams] = inline, **rest: Any
) -> penstock.Optimizer:
    stock = torch.optim.SGD(model.parameters(), lr=0.1)
    return prepare_on(streams(), model, stock, **{"precision": "fp32", **rest}, unit_micro_batches=slices)


def values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_as_plain(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], *, slices: int = 3, rtol: float = 1e-5, **rest: Any
) -> None:
    """The loss and every element of every gradient are plain torch's, wherever the parameters lie."""
    plain = copy.deepcopy(model)
    expected = loss_of(plain)
    expected.backward()
    # What cancels out (the gradient of a key's bias) is the rounding of its terms, as large as other gradients.
    atol = 1e-6 * max(1.0, *(float(p.grad.abs().max()) for p in plain.parameters()))
    for streams, placement in PLACES:
        own = copy.deepcopy(model)
        optimizer = prepared(own, slices, streams, placement=placement, **rest)
        loss = loss_of(own)
        torch.testing.assert_close(loss, expected, rtol=rtol, atol=1e-6)
        optimizer.backward(loss)
        for (name, p), q in zip(own.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                optimizer.full_grad(p), q.grad, rtol=rtol, atol=atol, msg=lambda m, n=name: n + m
            )
        optimizer.close()


# Autocast


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("inside", [False, True])
def test_what_runs_again_runs_under_the_same_autocast(inside: bool) -> None:
    """Also where backward runs inside the context, whose cache of cast weights has none with a graph."""
    dtypes: list[torch.dtype] = []

    class Noting(Feed):
        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            dtypes.append(y.dtype)
            return x + self.down(torch.tanh(y))

    found = []
    for slices in (1, 3):
        model = made(Noting)
        optimizer = prepared(model, slices)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(values(ROWS, WIDTH)).float().square().sum()
            if inside:
                optimizer.backward(loss)
        if not inside:
            optimizer.backward(loss)
        found.append([optimizer.full_grad(p) for p in model.parameters()])
        optimizer.close()
    assert set(dtypes) == {torch.bfloat16}
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 0.02 * b.abs().max()
        assert b.abs().sum() > 0


# Which arguments are cut


def encoder(batch_first: bool) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=batch_first)


def test_sequence_first_blocks_are_cut_along_the_batch() -> None:
    x, goal = values(STEPS, ROWS, WIDTH), values(STEPS, ROWS, WIDTH, seed=2)
    mask = torch.triu(torch.full((STEPS, STEPS), float("-inf")), 1)
    assert_as_plain(made(encoder(False)), lambda m: (m(x, mask) - goal).square().sum(), batch_dim=1)


def test_recurrent_blocks_return_states_with_samples_in_the_same_dimension() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            state = None
            for layer in self.layers:
                x, state = layer(x, state)
            return x * state[1]

    torch.manual_seed(0)
    model = Recurrent()
    assert_as_plain(model, lambda m: m(values(STEPS, ROWS, WIDTH)).square().sum(), batch_dim=1)


def test_arguments_are_cut_as_they_are_said_to_be() -> None:
    """A padding mask has its samples first, also where the sequence is: and as many of one as of the other."""
    x, goal = values(ROWS, ROWS, WIDTH), values(ROWS, ROWS, WIDTH, seed=2)
    mask = torch.triu(torch.ones(ROWS, ROWS, dtype=torch.bool), 1)
    padding = torch.zeros(ROWS, ROWS, dtype=torch.bool)
    padding[2, 4:] = True
    for first in (False, True):
        said = {"src": 0 if first else 1, "src_mask": None, "src_key_padding_mask": 0}
        assert_as_plain(made(encoder(first)), lambda m: (m(x, mask, padding) - goal).square().sum(), batch_dim=said)


@pytest.mark.parametrize(
    ("first", "dim", "told"),
    [(False, 0, "Use batch_dim=1"), (True, 1, "Use batch_dim=0")],
)
def test_a_layout_that_contradicts_the_blocks_own_is_refused(first: bool, dim: int, told: str) -> None:
    with pytest.raises(ConfigError, match=f"'blocks.0'.*'self_attn'.*batch_first={first}") as caught:
        prepared(made(encoder(first)), batch_dim=dim)
    assert told in str(caught.value)
    prepared(made(encoder(first)), 1, batch_dim=dim).close()  # nothing is cut
    with pytest.raises(ConfigError, match="batch_first=False"):
        prepared(nn.Sequential(nn.LSTM(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)))


class Turns(nn.Module):
    """Attention over sequences that come second, by a module that wants them first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        turned = hidden.transpose(0, 1)
        return hidden + self.attention(turned, turned, turned, need_weights=False)[0].transpose(0, 1)


def test_a_block_that_turns_its_inputs_itself_is_said_to() -> None:
    x = values(ROWS, STEPS, WIDTH)
    with pytest.raises(ConfigError, match=r"batch_dim=\{'hidden': 0\}"):
        prepared(made(Turns))
    assert_as_plain(made(Turns), lambda m: m(x).square().sum(), batch_dim={"hidden": 0})


def test_sequences_without_a_batch_are_refused() -> None:
    model = made(encoder(True))
    optimizer = prepared(model)
    with pytest.raises(EngineError, match=r"'blocks.0' was called with 'src' of shape \(5, 8\)"):
        model(values(STEPS, WIDTH))
    optimizer.close()


class Takes(nn.Module):
    """Adds and multiplies what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor, *, also: Tensor | None = None) -> Tensor:
        y = self.mix(x) * torch.tanh(other)
        return y if also is None else y + also


@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (ROWS, ROWS, WIDTH)], ids=["positions", "all"])
def test_what_may_be_positions_or_samples_is_refused(shape: tuple[int, ...]) -> None:
    """A batch of as many samples as there are positions, and slices of one: broadcasting would hide a wrong cut."""
    x, other = values(ROWS, ROWS, WIDTH), values(*shape, seed=2)
    model = made(Takes)
    optimizer = prepared(model, ROWS)
    with pytest.raises(EngineError, match=r"'blocks.0' was called with 'other' of shape .*batch_dim=\{'x': 0, 'other'"):
        model(x, other)
    optimizer.close()
    said = {"x": 0, "other": None if shape == (ROWS, WIDTH) else 0}
    assert_as_plain(made(Takes), lambda m: m(x, other).square().sum(), slices=ROWS, batch_dim=said)


def test_one_number_for_each_sample_or_feature_is_refused() -> None:
    model = made(Takes)
    optimizer = prepared(model)
    with pytest.raises(EngineError, match=r"'also' of shape \(6,\)"):
        model(values(ROWS, 3, WIDTH), values(ROWS, 3, WIDTH), also=values(ROWS))
    optimizer.close()


def test_what_is_the_first_argument_again_is_cut_like_it() -> None:
    x = values(ROWS, ROWS, WIDTH)

    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.attention(x, x, x, need_weights=False)[0]

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x, x, x, need_weights=False)[0]
            return x

    torch.manual_seed(0)
    assert_as_plain(Direct(), lambda m: m(x).square().sum())
    assert_as_plain(made(Same), lambda m: m(x).square().sum(), batch_dim={"x": 0})


def test_parameters_are_no_samples() -> None:
    """A parameter of as many rows as there are samples is handed to every slice."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.table = nn.Parameter(values(ROWS, WIDTH, seed=3))
            self.blocks = nn.ModuleList(Looks() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x, self.table)
            return x

    class Looks(Takes):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.mix(x) + torch.softmax(x @ table.T, -1) @ table

    torch.manual_seed(0)
    assert_as_plain(Table(), lambda m: m(values(ROWS, 3, WIDTH)).square().mean(), slices=ROWS)


class Heads(nn.Module):
    """Attention with a bias for each of as many heads as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        h = self.mix(x).unflatten(-1, (4, 2)).transpose(1, 2)
        scores = torch.softmax(h @ h.transpose(-1, -2) + bias, -1)
        return x + (scores @ h).transpose(1, 2).flatten(-2)


def test_a_cut_that_the_block_cannot_use_says_what_was_cut() -> None:
    model = made(Heads)
    optimizer = prepared(model, 4)
    with pytest.raises(RuntimeError) as caught:
        model(values(4, 3, WIDTH), values(4, 3, 3))
    assert "'x' and 'bias'" in caught.value.__notes__[0]
    optimizer.close()
    assert_as_plain(
        made(Heads),
        lambda m: m(values(4, 3, WIDTH), values(4, 3, 3)).square().sum(),
        slices=4,
        batch_dim={"bias": None},
    )


def test_names_that_no_block_takes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch_dim names 'maks'.*x, other, also"):
        prepared(made(Takes), batch_dim={"maks": None})


# What blocks return, and what they leave behind


class Pools(Feed):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.mean(0, keepdim=True)


class Counts(Feed):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), torch.stack([x.sum(), x.mean()])


@pytest.mark.parametrize(("kind", "slices"), [(Pools, 6), (Pools, 3), (Counts, 3), (Counts, 2)])
def test_outputs_of_the_batch_are_refused_also_where_they_have_a_slices_extent(
    kind: type[nn.Module], slices: int
) -> None:
    model = made(kind)
    optimizer = prepared(model, slices)
    with pytest.raises(EngineError, match="one value for each of them"):
        model.blocks[0](values(ROWS, WIDTH))
    optimizer.close()


def test_one_number_for_each_sample_may_be_returned() -> None:
    class Scores(Feed):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x.sum(-1)

    class Net(Stack):
        def forward(self, x: Tensor) -> Any:
            x, score = self.blocks[0](self.first(x))
            return self.blocks[1](x)[0] * score[:, None]

    torch.manual_seed(0)
    assert_as_plain(Net(Scores), lambda m: m(values(ROWS, WIDTH)).square().sum())


LOSSES: list[Tensor] = []


class Leaves(Feed):
    def forward(self, x: Tensor) -> Tensor:
        self.loss = x.square().mean()
        return super().forward(x)


class Appends(Feed):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.up(x).square().mean())
        return super().forward(x)


class Elsewhere(Feed):
    def forward(self, x: Tensor) -> Tensor:
        LOSSES.append(x.square().mean())
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Leaves, r"'blocks.0' leaves a tensor of shape \(\) in 'loss'"),
        (Appends, r"'blocks.0' leaves a tensor of shape \(\) in 'seen'"),
        (Elsewhere, r"'blocks.0' made a tensor of shape \(\) \(aten.mean.*that outlives it"),
    ],
)
def test_tensors_that_a_block_leaves_are_refused(kind: type[nn.Module], match: str) -> None:
    model = made(kind)
    optimizer = prepared(model)
    with pytest.raises(EngineError, match=match):
        model(values(ROWS, WIDTH))
    LOSSES.clear()
    with torch.no_grad():
        model(values(ROWS, WIDTH))  # nothing is cut
    LOSSES.clear()
    optimizer.close()


def test_a_list_among_the_arguments_that_a_block_fills_is_refused() -> None:
    class Fills(Feed):
        def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
            losses.append(x.square().mean())
            return super().forward(x)

    model = made(Fills)
    optimizer = prepared(model)
    with pytest.raises(EngineError, match=r"'blocks.0' changes 'losses'"):
        model(values(ROWS, WIDTH), [])
    optimizer.close()


def test_an_argument_that_is_changed_in_place_is_refused() -> None:
    class Changes(Feed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    model = made(Changes)
    optimizer = prepared(model)
    with pytest.raises(EngineError, match=r"'blocks.0' changes 'x' in place"):
        model(values(ROWS, WIDTH))
    optimizer.close()


def test_what_a_block_computes_once_and_keeps_is_let_be() -> None:
    class Caches(Feed):
        table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None or self.table.shape[-1] != x.shape[-1]:
                self.table = torch.linspace(0, 1, x.shape[-1])
            return super().forward(x + self.table)

    model = made(Caches)
    assert_as_plain(model, lambda m: m(values(ROWS, WIDTH)).square().sum())


def test_old_weight_norm_puts_its_weight_where_it_is_read() -> None:
    class Normed(Feed):
        def __init__(self) -> None:
            super().__init__()
            with pytest.warns(FutureWarning):
                torch.nn.utils.weight_norm(self.up)

    found = []
    for slices in (1, 3):
        torch.manual_seed(0)
        model = Stack(Normed)
        optimizer = prepared(model, slices)
        optimizer.backward(model(values(ROWS, WIDTH)).square().sum())
        found.append([optimizer.full_grad(p) for p in model.parameters()])
        optimizer.close()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_hooks_that_keep_what_a_slice_made_are_named_and_others_run() -> None:
    kept: list[Any] = []

    def notes(module: nn.Module, args: Any, output: Tensor) -> None:
        kept.append(float(output.detach().mean()))

    def keeps(module: nn.Module, args: Any, output: Tensor) -> None:
        kept.append(output.square().mean())

    def keeps_input(module: nn.Module, args: Any) -> None:
        kept.append(args[0])

    model = made(Feed)
    optimizer = prepared(model)
    for watched in (model.blocks[1].up, model.blocks[1]):
        handle = watched.register_forward_hook(notes)
        optimizer.backward(model(values(ROWS, WIDTH)).square().sum())
        handle.remove()
    handle = model.blocks[1].register_forward_hook(keeps)  # it sees the whole batch
    model(values(ROWS, WIDTH))
    handle.remove()
    assert kept.pop().requires_grad
    for register, hook in (("register_forward_hook", keeps), ("register_forward_pre_hook", keeps_input)):
        handle = getattr(model.blocks[1].up, register)(hook)
        with pytest.raises(EngineError, match=rf"'blocks.1' made a tensor.*hook.*{hook.__name__} on 'up'"):
            model(values(ROWS, WIDTH))
        handle.remove()
        optimizer.zero_grad()
    optimizer.backward(model(values(ROWS, WIDTH)).square().sum())
    optimizer.close()


class Normalised(Feed):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Spectral(Feed):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.parametrizations.spectral_norm(self.up)


class Averages(Feed):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return super().forward(x - self.average)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Normalised, "'norm' of block 'blocks.0' is a BatchNorm1d"),
        (Spectral, "'blocks.0' changes its buffer 'up.parametrizations.weight.0._[uv]'"),
        (Averages, "'blocks.0' changes its buffer 'average'"),
    ],
)
def test_buffers_that_change_with_each_slice_are_refused(kind: type[nn.Module], match: str) -> None:
    model = made(kind)
    optimizer = prepared(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(EngineError, match=match):
        model(values(ROWS, WIDTH))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    optimizer.close()


def test_batch_norm_that_only_reads_its_statistics_is_cut() -> None:
    model = made(Normalised)
    for block in model.blocks:
        block.norm.eval()
    assert_as_plain(model, lambda m: m(values(ROWS, WIDTH)).square().sum())


# Backward


def test_gradients_of_inputs_alone_are_refused_and_change_nothing() -> None:
    model = made(Feed)
    optimizer = prepared(model)
    x = values(ROWS, WIDTH).requires_grad_()
    with pytest.raises(EngineError, match=r"'blocks.1'.*torch.autograd.grad"):
        torch.autograd.grad(model(x).square().sum(), x)
    with pytest.raises(EngineError, match=r"'blocks.1'.*create_graph=True"):
        model(x).square().sum().backward(create_graph=True)
    optimizer.zero_grad()
    optimizer.backward(model(x).square().sum())
    found = [optimizer.full_grad(p) for p in model.parameters()]
    optimizer.close()
    plain = made(Feed)
    plain(values(ROWS, WIDTH)).square().sum().backward()
    for a, p in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-5, atol=1e-6)


class Chooses(nn.Module):
    """Uses its second argument for some samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor, mask: Tensor) -> Tensor:
        return self.mix(x) + other if bool(mask.any()) else self.mix(x)


def test_an_argument_that_some_slices_do_not_use_has_no_gradient_there() -> None:
    class Net(Stack):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            other = self.first(x)
            for block in self.blocks:
                x = block(x, other, mask)
            return x

    torch.manual_seed(0)
    model = Net(Chooses)
    plain = copy.deepcopy(model)
    mask = torch.zeros(ROWS, 1, dtype=torch.bool)
    mask[2] = True
    optimizer = prepared(model)
    optimizer.backward(model(values(ROWS, WIDTH), mask).square().sum())
    found = [optimizer.full_grad(p) for p in model.parameters()]
    optimizer.close()
    x, other = values(ROWS, WIDTH), plain.first(values(ROWS, WIDTH))
    for block in plain.blocks:
        x = torch.cat([block(x[i : i + 2], other[i : i + 2], mask[i : i + 2]) for i in range(0, ROWS, 2)])
    x.square().sum().backward()
    for a, p in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-5, atol=1e-6)


def test_mixtures_whose_routers_loss_is_wanted_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        use_cache=False,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    tokens = torch.arange(60).view(4, 15) % 64
    optimizer = prepared(model, 2)
    optimizer.backward(model(tokens, labels=tokens).loss)
    for wanted in ("output_router_logits", "output_attentions"):
        with pytest.raises(EngineError, match=r"'model.layers.0' made a tensor.*output_capturing_hook on"):
            model(tokens, labels=tokens, **{wanted: True})
    optimizer.zero_grad()
    optimizer.backward(model(tokens, labels=tokens).loss)  # its hooks are there now, and keep nothing
    found = [optimizer.full_grad(p) for p in model.parameters()]
    optimizer.close()
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    for a, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if p.grad is None else p.grad, rtol=1e-4, atol=1e-6)
