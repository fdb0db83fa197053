"""Models of the transformers library, from tiny configurations with random weights."""

import torch
from torch import Tensor, nn

from tests.models.family import Batch, Family, one_loss

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def llama(**changes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{"vocab_size": 32, "num_key_value_heads": 1, **SIZES, **changes}))


def chunked_llama(**changes) -> nn.Module:
    """Its loss is made of three blocks of the vocabulary, the last one narrower."""
    from penstock.integrations.chunked import chunk_loss

    model = llama(vocab_size=300, **changes)
    chunk_loss(model, chunk_bytes=1)
    return model


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
    return GPT2LMHeadModel(config)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=32, decoder_start_token_id=0, **sizes))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=3, **SIZES))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=32, max_position_embeddings=16, **SIZES))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        **SIZES,
    )
    return MixtralForCausalLM(config)


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}


def qwen2_moe() -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = {"vocab_size": 32, "num_key_value_heads": 1, "shared_expert_intermediate_size": 16}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, **MIXTURE, **SIZES))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 32, "num_key_value_heads": 1, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **MIXTURE, **SIZES))


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
