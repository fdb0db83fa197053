"""What a model writes: prompts in one batch, ends in step, parameters gathered once where they fit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.cli.ranks import Ranks
from penstock.cli.training.reporting import samples as module
from penstock.cli.training.reporting.samples import (
    Prompt,
    Sample,
    Sampling,
    chat_prompts,
    sample_ids,
    stop_ids_of,
    text_prompts,
    write_samples,
)

ALONE = Ranks(0, 1, torch.device("cpu"))
VOCABULARY = 32


class Next(nn.Module):
    """A model that says what it is sure of: after id i comes i + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.shift = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, input_ids: Tensor, use_cache: bool = True) -> Any:
        assert not use_cache
        assert not self.training
        assert not torch.is_grad_enabled()
        self.seen.append(input_ids)
        logits = 100.0 * nn.functional.one_hot((input_ids + 1) % VOCABULARY, VOCABULARY)
        return type("Output", (), {"logits": logits})


def sampling(token_count: int = 4, **options: Any) -> Sampling:
    return Sampling(**{"token_count": token_count, "seq_length": 8, "seed": 0} | options)


def test_prompts_of_different_lengths_are_one_batch() -> None:
    model = Next().eval()
    with torch.no_grad():
        assert sample_ids(model, [[1], [5, 6, 7]], sampling(), ALONE) == [[2, 3, 4, 5], [8, 9, 10, 11]]
    assert len(model.seen) == 4
    assert model.seen[1].tolist() == [[1, 2, 0, 0], [5, 6, 7, 8]]


def test_the_model_sees_the_last_ids_alone() -> None:
    model = Next().eval()
    with torch.no_grad():
        assert sample_ids(model, [[1, 2, 3]], sampling(3, seq_length=2), ALONE) == [[4, 5, 6]]
    assert [seen.tolist() for seen in model.seen] == [[[2, 3]], [[3, 4]], [[4, 5]]]


def test_a_sample_ends_at_its_end_token_and_the_others_go_on() -> None:
    model = Next().eval()
    with torch.no_grad():
        written = sample_ids(model, [[1], [5]], sampling(9, stop_ids=frozenset({4, 9})), ALONE)
    assert written == [[2, 3], [6, 7, 8]]
    assert [len(seen) for seen in model.seen] == [2, 2, 2, 1]  # and no pass after the last


def test_ranks_go_on_with_what_the_first_one_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([7, 3])
    monkeypatch.setattr(Ranks, "from_first", lambda self, values: values.fill_(next(drawn)))
    model = Next().eval()
    with torch.no_grad():
        written = sample_ids(model, [[1]], sampling(9, stop_ids=frozenset({3})), Ranks(1, 2, torch.device("cpu")))
    assert written == [[7]]
    assert [seen.tolist() for seen in model.seen] == [[[1]], [[1, 7]]]


class Level(nn.Module):
    """A model to which all ids are alike, or none is a number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.logits = torch.full((VOCABULARY,), value)

    def forward(self, input_ids: Tensor, use_cache: bool = True) -> Any:
        return type("Output", (), {"logits": self.logits.expand(*input_ids.shape, VOCABULARY)})


def test_the_seed_fixes_what_is_drawn_and_training_draws_as_before() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (sample_ids(Level(0.0), [[1]], sampling(20, seed=seed), ALONE) for seed in (0, 0, 1))
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before)
    assert len(set(first[0])) > 5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_that_diverged_writes_something(value: float, temperature: float) -> None:
    (written,) = sample_ids(Level(value), [[1]], sampling(5, temperature=temperature), ALONE)
    assert len(written) == 5
    assert all(0 <= token < VOCABULARY for token in written)


def test_ids_that_a_model_rules_out_are_not_drawn() -> None:
    model = Level(0.0)
    model.logits[3:] = float("-inf")
    (written,) = sample_ids(model, [[1]], sampling(50), ALONE)
    assert set(written) == {0, 1, 2}


def test_without_a_temperature_the_likeliest_is_taken() -> None:
    model = Level(0.0)
    model.logits[3] = 0.1
    assert sample_ids(model, [[1]], sampling(5, temperature=0.0), ALONE) == [[3] * 5]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))


def test_a_batch_of_a_real_model_is_each_prompt_alone() -> None:
    model = llama().eval()
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    with torch.no_grad():
        together = sample_ids(model, prompts, sampling(6, temperature=0.0), ALONE)
        alone = [sample_ids(model, [prompt], sampling(6, temperature=0.0), ALONE)[0] for prompt in prompts]
        rows = [*prompts]
        wanted: list[list[int]] = [[] for _ in rows]
        for number, row in enumerate(rows):
            for _ in range(6):
                whole: Any = model(input_ids=torch.tensor([row[-8:]]))
                wanted[number].append(int(whole.logits[0, -1].argmax()))
                row.append(wanted[number][-1])
    assert together == alone == wanted


def test_logits_are_made_of_the_last_places_alone() -> None:
    model: Any = llama().eval()
    shapes: list[tuple[int, ...]] = []
    model.lm_head.register_forward_hook(lambda module, given, logits: shapes.append(tuple(logits.shape)))
    with torch.no_grad():
        sample_ids(model, [[1, 2, 3], [4], [5, 6, 7]], sampling(1), ALONE)
    assert shapes == [(3, 2, VOCABULARY)]  # after the first id, and after the third


@pytest.fixture
def prepared(tmp_path: Path) -> Iterator[tuple[nn.Module, penstock.Optimizer]]:
    model = llama()
    placement = penstock.Placement(params="nvme", optimizer="cpu", nvme_path=tmp_path)
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32", placement=placement)
    yield model, optimizer
    optimizer.close(keep_params=False)


def test_parameters_are_gathered_once_where_they_fit(
    prepared: tuple[nn.Module, penstock.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = prepared
    gathered: list[int] = []
    real = penstock.Optimizer.gathered

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        gathered.append(1)
        return real(self, *args, **options)

    monkeypatch.setattr(penstock.Optimizer, "gathered", noted)
    prompts = [Prompt("ab", (1, 2)), Prompt("c", (3,))]

    def write() -> list[Sample]:
        return write_samples(model, optimizer, prompts, str, sampling(6), ALONE)

    whole = write()
    assert len(gathered) == 1
    assert model.training
    monkeypatch.setattr(module, "_free_bytes", lambda device: 1000.0)
    assert write() == whole
    assert len(gathered) == 1
    assert [sample.prompt for sample in whole] == ["ab", "c"]
    assert all(sample.text.count(",") == 5 for sample in whole)
    optimizer.backward(model(input_ids=torch.ones(1, 4, dtype=torch.int64), labels=torch.ones(1, 4).long()).loss)
    optimizer.step()  # training goes on


def test_the_model_trains_on_or_rests_as_before() -> None:
    model = Next()
    for training in (True, False):
        model.train(training)
        assert write_samples(model, None, [Prompt("a", (1,))], str, sampling(2), ALONE) == [Sample("a", "[2, 3]")]
        assert model.training is training
    assert write_samples(model, None, [], str, sampling(), ALONE) == []
    assert write_samples(model, None, [Prompt("a", (1,))], str, sampling(0), ALONE) == []


def test_a_prompt_of_a_chat_is_what_a_user_says() -> None:
    said: list[list[dict[str, str]]] = []

    def render(messages: list[dict[str, str]]) -> list[int]:
        said.append(messages)
        return [1, 2]

    assert chat_prompts(["hi", "you"], render) == [Prompt("hi\n", (1, 2)), Prompt("you\n", (1, 2))]
    assert said == [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "you"}]]


def test_a_prompt_without_a_token_is_left_out() -> None:
    assert text_prompts(["", "ab"], lambda text: text.encode()) == [Prompt("ab", (97, 98))]
    assert chat_prompts(["a"], lambda messages: []) == []


@pytest.mark.parametrize(
    ("of_settings", "expected"), [(None, {9}), (3, {3, 9}), ([3, 4], {3, 4, 9}), ("3", {9}), ([None, "x"], {9})]
)
def test_tokens_that_end_a_sample(of_settings: object, expected: set[int]) -> None:
    model: Any = nn.Module()
    model.generation_config = type("Settings", (), {"eos_token_id": of_settings})
    assert stop_ids_of(model, 9, None) == expected
    assert stop_ids_of(nn.Module(), None) == frozenset()
