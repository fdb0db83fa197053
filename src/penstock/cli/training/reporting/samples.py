"""What the model writes: prompts continued in step on all ranks."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.cli.ranks import Ranks

TEMPERATURE = 0.8
#: The share of the device's free memory that whole parameters may take; activations take the rest.
WHOLE_SHARE = 0.7


@dataclass(frozen=True)
class Prompt:
    """What is continued.

    Attributes:
        text: as people are shown it.
        ids: as the model reads it, one id at least.
    """

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """What a model has written.

    Attributes:
        prompt: what it was given, as people are shown it.
        text: what it wrote after that, without the token that ended it.
    """

    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How prompts are continued.

    Attributes:
        token_count: tokens of a sample, at most.
        seq_length: tokens that the model sees, at most: the last ones.
        seed: fixes what is drawn; the random state of training is not touched.
        stop_ids: tokens that end a sample.
        temperature: what logits are divided by; 0 takes the likeliest token.
    """

    token_count: int
    seq_length: int
    seed: int
    stop_ids: frozenset[int] = frozenset()
    temperature: float = TEMPERATURE


def text_prompts(texts: Sequence[str], encode: Callable[[str], Iterable[int]]) -> list[Prompt]:
    """Make prompts of texts that are continued. Texts without a token are left out: there is nothing to continue."""
    prompts = [Prompt(text, tuple(int(i) for i in encode(text))) for text in texts]
    return [prompt for prompt in prompts if prompt.ids]


def chat_prompts(texts: Sequence[str], render: Callable[[list[dict[str, str]]], Iterable[int]]) -> list[Prompt]:
    """Make prompts of what a user says; the model answers.

    Arguments:
        texts: each the only message of a conversation.
        render: makes ids of messages by the chat template, with what begins the assistant's turn at the end.
    """
    rendered = ((text, tuple(int(i) for i in render([{"role": "user", "content": text}]))) for text in texts)
    return [Prompt(f"{text}\n", ids) for text, ids in rendered if ids]


def stop_ids_of(model: nn.Module, *others: int | None) -> frozenset[int]:
    """List the tokens that end what a model writes: those of its generation settings, and others that are known."""
    settings: Any = getattr(model, "generation_config", None)
    found: Any = getattr(settings, "eos_token_id", None)
    return frozenset(i for i in (*(found if isinstance(found, list) else [found]), *others) if isinstance(i, int))


def write_samples(
    model: nn.Module,
    optimizer: penstock.Optimizer | None,
    prompts: Sequence[Prompt],
    decode: Callable[[list[int]], str],
    sampling: Sampling,
    ranks: Ranks,
) -> list[Sample]:
    """Let the model continue prompts. Every rank calls it.

    Arguments:
        model: a causal language model.
        optimizer: what `penstock.prepare` returned for it: parameters are gathered once where they fit the device;
            `None` for a model that is whole.
        prompts: the same on every rank.
        decode: makes text of ids.
        sampling: how they are continued.
        ranks: the place of this process.
    """
    if not prompts or not sampling.token_count:
        return []
    with _measured(model), _whole(model, optimizer, ranks):
        written = sample_ids(model, [list(prompt.ids) for prompt in prompts], sampling, ranks)
    return [Sample(prompt.text, decode(ids)) for prompt, ids in zip(prompts, written, strict=True)]


def sample_ids(model: nn.Module, prompts: list[list[int]], sampling: Sampling, ranks: Ranks) -> list[list[int]]:
    """Continue prompts, all in one batch, and return what was drawn for each, without what ended it.

    Every rank runs every forward pass, because the parameters may be sharded; rank 0 draws, and what it draws is what
    all ranks go on with: so they end after the same pass. No cache is kept: it differs from one kind of model to the
    next. Rows are filled up at their ends, which a causal model does not see from before.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    rows = [list(prompt) for prompt in prompts]
    written: list[list[int]] = [[] for _ in rows]
    open_rows = list(range(len(rows)))
    for _ in range(sampling.token_count):
        contexts = [rows[row][-sampling.seq_length :] for row in open_rows]
        logits = _last_logits(model, contexts, ranks.device)
        # Without the broadcast, ranks whose sums are rounded otherwise would continue different texts.
        drawn = ranks.from_first(_draw(logits, sampling.temperature, generator).to(ranks.device)).tolist()
        for row, token in zip(open_rows, drawn, strict=True):
            rows[row].append(token)
            if token not in sampling.stop_ids:
                written[row].append(token)
        open_rows = [row for row in open_rows if rows[row][-1] not in sampling.stop_ids]
        if not open_rows:
            break
    return written


def _last_logits(model: nn.Module, contexts: list[list[int]], device: torch.device) -> Tensor:
    """Compute the logits after each context: [contexts, vocabulary], fp32, on the cpu."""
    longest = max(len(context) for context in contexts)
    ids = torch.tensor([context + [0] * (longest - len(context)) for context in contexts], device=device)
    lasts = torch.tensor([len(context) - 1 for context in contexts], device=device)
    options: dict[str, Any] = {}
    # peft's own forward takes anything, and hands it to the model within.
    within: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if "logits_to_keep" in inspect.signature(within.forward).parameters:
        # Logits are large: of 1,024 positions and a vocabulary of 128,000 half a GiB for each row.
        options["logits_to_keep"], places = torch.unique(lasts, return_inverse=True)
    else:
        places = lasts
    logits = model(input_ids=ids, use_cache=False, **options).logits
    last: Tensor = logits[torch.arange(len(contexts), device=device), places].float().cpu()
    return last


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Draw a token of each row of logits; of a model that diverged to NaN or infinity all tokens are alike."""
    most = logits.amax(dim=-1, keepdim=True)  # NaN where one is; -inf is a token that the model rules out
    logits = torch.where(torch.isfinite(most), logits, torch.zeros_like(logits))
    if temperature == 0:
        return logits.argmax(dim=-1)
    return torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)[:, 0]


@contextmanager
def _measured(model: nn.Module) -> Iterator[None]:
    """Run a model without dropout and without a graph; it trains on afterwards if it did before."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


@contextmanager
def _whole(model: nn.Module, optimizer: penstock.Optimizer | None, ranks: Ranks) -> Iterator[None]:
    """Gather all parameters once where they fit every rank's device; else each forward pass gathers. Collective."""
    if optimizer is not None and ranks.sum(torch.tensor(float(_fits(model, ranks)))) == ranks.world_size:
        with optimizer.gathered():
            yield
    else:
        yield


def _fits(model: nn.Module, ranks: Ranks) -> bool:
    """Tell whether whole parameters leave room on this rank's device."""
    wanted = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return wanted <= WHOLE_SHARE * _free_bytes(ranks.device)


def _free_bytes(device: torch.device) -> float:
    """Count the bytes of a device that torch has and does not use, or can have; of a cpu nobody counts them."""
    if device.type == "cpu":
        return math.inf
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):  # not every accelerator's module has it
        return 0.0
    free = int(module.mem_get_info(device)[0])
    return free + int(module.memory_reserved(device)) - int(module.memory_allocated(device))
