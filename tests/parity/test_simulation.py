"""A simulation submits what a real run does: the same jobs, of as many bytes, after the same ones.

No real stream is faster or slower here than a noted one: a witness says when an event counts as over, in both.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.blueprint import PrepareRequest, request_for
from penstock.planner.simulation.simulate import Setup, loss_of
from penstock.runtime.streams import Streams
from tests.lib.models import llama
from tests.lib.streams import inline, separate
from tests.parity.rows import INPUTS, Movement, Net, changed, shares
from tests.simulations import as_simulated, run_really, simulated

TILES = (("tile_bytes", 4096),)


Models = dict[str, Callable[[], nn.Module]]


def models(width: int, vocabulary: int, *, layers: int, experts: str | None = None, **config: Any) -> Models:
    """Transformers that differ in what is submitted: heads that are tied or not, recomputing, experts."""
    sizes = {"vocab_size": vocabulary, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False, **config}

    def recomputed() -> nn.Module:
        model = llama(3, width, **sizes)
        model.gradient_checkpointing_enable()
        return model.train()

    def gpt2() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        of_it = {"n_embd": width, "n_layer": layers, "n_head": 4, "vocab_size": vocabulary, "n_positions": 64}
        attention = {"attn_implementation": config.get("attn_implementation"), "bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(**of_it, **attention)).train()

    def moe() -> nn.Module:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        of_it = {"hidden_size": width, "intermediate_size": 2 * width, "moe_intermediate_size": width // 2}
        of_it |= {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": width // 4, "num_hidden_layers": 2}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**of_it, **sizes, experts_implementation=experts)).train()

    return {
        "llama": partial(llama, 3, width, **sizes),
        "recomputed": recomputed,
        "tied": partial(llama, 3, width, **sizes, tie_word_embeddings=True),
        "gpt2": gpt2,
        "moe": moe,
    }


def partly_frozen() -> nn.Module:
    model = SMALL["llama"]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "norm" in name)
    return model


def text() -> dict[str, Tensor]:
    ids = torch.arange(2 * 16).view(2, 16) % 96
    return {"input_ids": ids, "labels": ids}


SMALL = models(32, 96, layers=2)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "net": (Net, lambda: torch.ones(16, INPUTS)),
    **{name: (make, text) for name, make in SMALL.items()},
    "partly frozen": (partly_frozen, text),
}

AT_HOME = Movement()
UPDATED_ON_CPU = Movement(grads="cpu", optimizer="cpu")
ON_CPU = Movement(params="cpu", grads="cpu", optimizer="cpu", overlap="forward")
IN_FILES = Movement(params="nvme", grads="nvme", optimizer="nvme")
IN_TWO_FILES = Movement(params="cpu", grads="cpu", optimizer="nvme", overlap="forward", disks=2)
THIRDS = Movement(params=shares(0.3, 0.7), grads="cpu", optimizer=shares(0.25, 0.5, 0.25), overlap="forward")
HALVES = Movement(grads=shares(0.5, 0.5), optimizer=shares(0.5, 0.5))


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

#: Each model, each movement, and what changes the jobs of either, once or more.
ROWS = [
    Row("net", AT_HOME),
    Row("net", UPDATED_ON_CPU, "inline", precision="fp32"),
    Row("net", replace(ON_CPU, overlap="none"), "inline"),
    Row("net", HALVES, micro_batches=3),
    Row("net", THIRDS, "inline"),
    Row("net", ON_CPU.but(prefetch_bytes=0), precision="fp32", streamed=0.25),
    Row("net", IN_FILES, micro_batches=3),
    Row("llama", IN_TWO_FILES, activations="nvme"),
    Row("recomputed", ON_CPU, activations="cpu"),
    Row("tied", ON_CPU, precision="fp16", streamed=1.0),
    Row("gpt2", IN_FILES),
    Row("moe", ON_CPU.but(persistent_bytes=1 << 12)),
    Row("partly frozen", replace(ON_CPU, overlap="backward")),
]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
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
