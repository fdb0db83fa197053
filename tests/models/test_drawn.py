"""Classes drawn from transformers' mappings, each of a tiny configuration, train in bf16."""

import inspect
import math
import random
import warnings
from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.models.auto import configuration_auto, modeling_auto

from tests.lib.engines import prepare_on
from tests.lib.fuzz import TIMES
from tests.lib.streams import inline
from tests.models.contract import HYPER, ON_CPU

SEED = 7
KINDS = (
    *("CAUSAL_LM", "IMAGE_CLASSIFICATION", "SEQ_TO_SEQ_CAUSAL_LM", "CTC", "MASKED_LM", "SPEECH_SEQ_2_SEQ"),
    *("AUDIO_CLASSIFICATION", "QUESTION_ANSWERING", "TOKEN_CLASSIFICATION", "SEQUENCE_CLASSIFICATION"),
)
LARGEST = 5_000_000  # parameters
NO_BF16 = ("FNet",)  # torch has no Fourier transform of bf16
SIZES = [
    (
        16,
        "hidden_size d_model n_embd dim embed_dim model_dim embedding_size projection_dim emb_dim image_size "
        "attention_hidden_size decoder_hidden_size encoder_hidden_size q_lora_rank kv_lora_rank",
    ),
    (
        2,
        "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_decoder_layers depth "
        "num_encoder_layers num_attention_heads n_head num_heads n_heads encoder_attention_heads "
        "decoder_attention_heads "
        "num_key_value_heads num_kv_heads speech_encoder_layers speech_encoder_attention_heads num_experts_per_tok "
        "num_experts_per_token moe_topk eos_token_id decoder_start_token_id",
    ),
    (
        32,
        "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner hidden_dim ffn_hidden_size "
        "moe_intermediate_size speech_encoder_intermediate_size shared_expert_intermediate_size",
    ),
    (8, "head_dim d_kv kv_channels qk_rope_head_dim qk_nope_head_dim v_head_dim"),
    (64, "vocab_size max_position_embeddings n_positions max_source_positions max_target_positions"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts patch_size"),
    (1, "bos_token_id"),
    (0, "pad_token_id"),
    (
        0.0,
        "dropout hidden_dropout_prob attention_probs_dropout_prob attention_dropout activation_dropout resid_pdrop "
        "embd_pdrop attn_pdrop hidden_dropout layerdrop encoder_layerdrop decoder_layerdrop feat_proj_dropout "
        "final_dropout mask_time_prob mask_feature_prob classifier_dropout router_jitter_noise",
    ),
]
SMALL = {name: size for size, names in SIZES for name in names.split()}


def tiny(kind: type) -> Any:
    """A configuration of a class with what is large in it made small, in those that it consists of as well."""
    default, changes = kind(), {}
    for name, value in default.to_dict().items():
        if name in (getattr(kind, "sub_configs", None) or {}):
            changes[name] = tiny(type(getattr(default, name))).to_dict()
        elif name in SMALL and not isinstance(value, list | tuple | None):
            changes[name] = SMALL[name]
        elif name == "layer_types":
            changes[name] = None
        elif name in ("hidden_sizes", "embed_dims", "depths") and isinstance(value, list):
            changes[name] = [1 if name == "depths" else 8 * (i + 1) for i in range(len(value))]
    config = kind(**changes)
    config.use_cache, config.problem_type = False, "single_label_classification"
    for name in ("pad_token_id", "decoder_start_token_id"):
        if getattr(config, name, None) is None:
            setattr(config, name, 0)
    return config


def batch_of(model: nn.Module, kind: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names, main = inspect.signature(model.forward).parameters, model.main_input_name
    config = getattr(model.config, "vision_config", None) or model.config
    ids = torch.randint(3, 60, (2, 8), generator=generator)
    if main == "input_ids":
        inputs = {main: ids, "attention_mask": torch.ones_like(ids)}
    elif main == "pixel_values":
        size = getattr(config, "image_size", 32)
        inputs = {main: torch.randn(2, 3, *([size] * 2 if isinstance(size, int) else size), generator=generator)}
    else:
        shapes = {"input_values": (4000,), "input_features": (128, getattr(config, "num_mel_bins", 80))}
        inputs = {main: torch.randn(2, *shapes[main], generator=generator)}
    if "labels" in names and kind.endswith("CLASSIFICATION"):
        inputs["labels"] = torch.zeros_like(ids) if kind.startswith("TOKEN") else torch.zeros(2, dtype=torch.long)
    elif "labels" in names:
        inputs["labels"] = ids if main == "input_ids" else ids[:, :3] % 17 + 3
    return {name: value for name, value in inputs.items() if name in names}


def loss_of(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(1)
    output = model(**inputs)
    loss = getattr(output, "loss", None)
    if loss is None:
        first = next(v for v in output.values() if isinstance(v, torch.Tensor) and v.requires_grad)
        loss = first.float().square().mean()
    return loss


def drawn() -> Iterator[tuple[str, str, str]]:
    """Kind, and the names of configuration and class: each kind in its turn, in an order that a seed chooses."""
    by_kind = []
    for kind in KINDS:
        found = set()
        for model, names in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").items():
            for name in [names] if isinstance(names, str) else names:
                found.add((kind, configuration_auto.CONFIG_MAPPING_NAMES[model], name))
        by_kind.append(random.Random(SEED).sample(sorted(found), len(found)))
    yield from filter(None, chain.from_iterable(zip_longest(*by_kind)))


def built(config: Any, made: Any) -> nn.Module:
    torch.manual_seed(0)
    return made(config).train()


def test_classes_that_a_seed_draws_train_in_bf16() -> None:
    """Those that cannot be made so small, or lack a library, or do not train in plain fp32 either are left out."""
    count = 20 * TIMES
    ran, skipped, wrong = 0, 0, {}
    for kind, config_name, name in drawn():
        if ran == count:
            break
        try:
            config, made = tiny(getattr(transformers, config_name)), getattr(transformers, name)
            with torch.device("meta"):
                size = sum(p.numel() for p in made(config).parameters())
            assert size <= LARGEST
            assert not name.startswith(NO_BF16)
            plain = built(config, made)
            inputs = batch_of(plain, kind)
            expected = loss_of(plain, inputs)
            expected.backward()
            assert math.isfinite(expected.item())
        except Exception:
            skipped += 1
            continue
        ran += 1
        model = built(config, made)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                adam = torch.optim.AdamW(model.parameters(), **HYPER)
                optimizer = prepare_on(inline(), model, adam, placement=ON_CPU, precision="bf16")
            loss = loss_of(model, inputs)
            optimizer.backward(loss)
            assert not optimizer.step().skipped
            optimizer.close()
            # Statistics of a batch of two rows magnify what rounding does to one of them.
            near = math.inf if any(isinstance(m, _BatchNorm) for m in model.modules()) else 0.02
            assert math.isfinite(loss.item())
            assert abs(loss.item() - expected.item()) <= near * (1 + abs(expected.item())), (loss, expected)
        except Exception as error:
            wrong[f"{name} of {config_name}"] = f"{type(error).__name__}: {error}"
    print(f"{ran} classes ran, {skipped} were left out")
    assert not wrong
    assert ran == count
