"""A simulation submits what a real run does: the same jobs, of as many bytes, after the same ones.

No real stream is faster or slower here than a noted one: a witness says when an event counts as over, in both.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.blueprint import PrepareRequest, request_for
from penstock.planner.simulation.simulate import Setup, loss_of
from penstock.runtime.streams import Streams
from tests.lib.streams import inline, separate
from tests.parity.rows import INPUTS, Movement, Net, changed, shares
from tests.simulations import as_simulated, run_really, simulated

TILES = (("tile_bytes", 4096),)


def net() -> nn.Module:
    return Net()


def net_batch() -> Tensor:
    return torch.ones(16, INPUTS)


def llama(recompute: bool = False, **changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, vocab_size=96, use_cache=False, **changes))
    if recompute:
        model.gradient_checkpointing_enable()
    return model.train()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=96, n_positions=64)).train()


def moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, num_hidden_layers=2, vocab_size=96)).train()


def partly_frozen() -> nn.Module:
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "norm" in name)
    return model


def text() -> dict[str, Tensor]:
    ids = torch.arange(2 * 16).view(2, 16) % 96
    return {"input_ids": ids, "labels": ids}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "net": (net, net_batch),
    "llama": (llama, text),
    "recomputed": (partial(llama, recompute=True), text),
    "tied": (partial(llama, tie_word_embeddings=True), text),
    "gpt2": (gpt2, text),
    "moe": (moe, text),
    "partly frozen": (partly_frozen, text),
}

PLACEMENTS = (
    Movement(),
    Movement(grads="cpu", optimizer="cpu"),
    Movement(params="cpu", grads="cpu", optimizer="cpu", overlap="forward"),
    Movement(params="cpu", grads="cpu", optimizer="cpu", overlap="none"),
    Movement(params="nvme", grads="nvme", optimizer="nvme"),
    Movement(params="cpu", grads="cpu", optimizer="nvme", overlap="forward", disks=2),
    Movement(params=shares(0.3, 0.7), grads="cpu", optimizer=shares(0.25, 0.5, 0.25), overlap="forward"),
    Movement(grads=shares(0.5, 0.5), optimizer=shares(0.5, 0.5)),
    Movement(params="cpu", grads="cpu", optimizer="cpu", overlap="backward"),
)


@dataclass(frozen=True)
class Row:
    """What is simulated."""

    model: str
    how: Movement
    streams: str = "separate"
    micro_batches: int = 1
    activations: str | None = None
    precision: str = "bf16"
    streamed: float = 0.0

    @property
    def name(self) -> str:
        rest = " ".join(f"{k}={v}" for k, v in vars(self).items() if k not in ("model", "how") and v != _PLAIN[k])
        return f"{self.model}: {changed(self.how)} {rest}".strip()

    def request(self, model: nn.Module) -> PrepareRequest:
        placement = self.how.placement
        if self.activations is not None:
            placement = replace(placement, activations=self.activations)
            if self.activations == "nvme" and not placement.nvme_folders():
                placement = replace(placement, nvme_path=Movement(params="nvme").placement.nvme_path)
        options = penstock.Options(**{**dict(TILES), "streamed_updates": self.streamed, **dict(self.how.options)})
        return request_for(
            model,
            stage=self.how.stage,
            placement=placement,
            precision=self.precision,
            overlap=self.how.overlap,
            options=options,
        )


_PLAIN = vars(Row("", Movement()))

#: Each model, and each movement, with both kinds of streams; and what changes the jobs of either.
ROWS = [
    *(Row(model, PLACEMENTS[number + 2]) for number, model in enumerate(MODELS)),
    *(Row("net", how) for how in PLACEMENTS),
    *(Row(model, how, "inline") for model, how in zip(cycle(("net", "recomputed")), PLACEMENTS, strict=False)),
    *(Row("llama", how, micro_batches=3) for how in (PLACEMENTS[1], PLACEMENTS[4], PLACEMENTS[7])),
    Row("llama", PLACEMENTS[2], precision="fp32", streamed=0.25),
    Row("llama", PLACEMENTS[2], precision="fp16", streamed=1.0),
    Row("recomputed", PLACEMENTS[2], activations="cpu"),
    Row("llama", PLACEMENTS[2], activations="cpu"),
    Row("llama", PLACEMENTS[5], activations="nvme"),
    Row("llama", PLACEMENTS[2].but(prefetch_bytes=0)),
    Row("llama", PLACEMENTS[2].but(persistent_bytes=1 << 12)),
]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


@pytest.mark.parametrize("row", list(dict.fromkeys(ROWS)), ids=lambda row: row.name)
def test_a_rehearsal_submits_what_a_run_does(row: Row) -> None:
    make, batch = MODELS[row.model]
    torch.manual_seed(0)
    streams: Streams = {"inline": inline, "separate": separate}[row.streams]()
    model = make()
    real, prepared = run_really(
        model, optimizer_of(model), batch, row.request(model), streams, micro_batches=row.micro_batches, loss_of=loss_of
    )
    at_rest = {tier: prepared.locations().bytes(tier=tier) for tier in ("device", "cpu", "nvme")}
    prepared.close(keep_params=False)
    del prepared
    gc.collect()

    meant = make()
    setup = Setup(
        meant,
        optimizer_of(meant),
        batch,
        micro_batches=row.micro_batches,
        back_end="inline" if row.streams == "inline" else "threads",
    )
    virtual, found = simulated(setup, row.request(meant))
    real = as_simulated(real, found.program)
    for number, (one, other) in enumerate(zip(real, virtual, strict=False)):
        assert one == other, f"job {number} of {len(real)}"
    assert len(real) == len(virtual)
    drawn = dict.fromkeys(at_rest, 0)
    for segment in found.blueprint.segments:
        drawn[segment.tier.value] += sum(cell.nbytes for cell in segment.cells)
    if row.activations is None and "persistent_bytes" not in dict(row.how.options):  # else what is gathered counts, too
        assert at_rest == drawn
    assert all(parameter.device.type == "cpu" and parameter.numel() for parameter in meant.parameters())
