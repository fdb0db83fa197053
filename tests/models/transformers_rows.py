"""Models of the transformers library, from tiny configurations with random weights."""

from functools import partial

import torch
from torch import Tensor, nn

from tests.lib import models
from tests.models.family import Batch, Family, one_loss

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
LANGUAGE = {"vocab_size": 32, "num_key_value_heads": 1, **SIZES}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}

llama = partial(models.llama, width=16)


def make(name: str, **config: object) -> nn.Module:
    """A model by the name of its class."""
    import transformers

    made = getattr(transformers, name)
    return made(made.config_class(**config))


def chunked_llama(**changes) -> nn.Module:
    """Its loss is made of three blocks of the vocabulary, the last one narrower."""
    from penstock.integrations.chunked import chunk_loss

    model = llama(vocab_size=300, **changes)
    chunk_loss(model, chunk_bytes=1)
    return model


gpt2 = partial(
    make,
    "GPT2LMHeadModel",
    **{"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0},
    eos_token_id=1,
)
t5 = partial(
    make,
    "T5ForConditionalGeneration",
    **{"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    decoder_start_token_id=0,
)
vit = partial(make, "ViTForImageClassification", image_size=8, patch_size=4, num_labels=3, **SIZES)
bert = partial(make, "BertForMaskedLM", vocab_size=32, max_position_embeddings=16, **SIZES)
mixtral = partial(
    make,
    "MixtralForCausalLM",
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1},
    **LANGUAGE,
)
qwen2_moe = partial(make, "Qwen2MoeForCausalLM", shared_expert_intermediate_size=16, **MIXTURE, **LANGUAGE)
qwen3_moe = partial(make, "Qwen3MoeForCausalLM", head_dim=8, **MIXTURE, **LANGUAGE)


def language_loss(model: nn.Module, batch: Batch) -> Tensor:
    ids = batch.ids(32, 2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return model(input_ids=ids, attention_mask=mask, labels=ids).loss


def t5_loss(model: nn.Module, batch: Batch) -> Tensor:
    ids = batch.ids(32, 2, 6)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    return model(input_ids=ids, attention_mask=mask, labels=batch.ids(32, 2, 4)).loss


def image_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(pixel_values=batch.floats(2, 3, 8, 8), labels=batch.ids(3, 2)).loss


TRANSFORMERS = [
    Family("llama", llama, one_loss(language_loss)),
    Family("llama_tied", lambda: llama(tie_word_embeddings=True), one_loss(language_loss)),
    Family("llama_chunked", chunked_llama, one_loss(language_loss)),
    Family("llama_chunked_tied", lambda: chunked_llama(tie_word_embeddings=True), one_loss(language_loss)),
    Family("gpt2", gpt2, one_loss(language_loss)),
    Family("t5", t5, one_loss(t5_loss)),
    Family("vit", vit, one_loss(image_loss)),
    Family("bert", bert, one_loss(language_loss)),
    Family("mixtral", mixtral, one_loss(language_loss)),
    Family("qwen2_moe", qwen2_moe, one_loss(language_loss)),
    Family("qwen3_moe", qwen3_moe, one_loss(language_loss)),
]
