"""Models of the transformers library with fp32 buffers in their arithmetic: positions, masks, decays, statistics."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from tests.models.family import Batch, Family, one_loss
from tests.models.transformers_rows import SIZES, image_loss, language_loss, make

WIDTH, TOKENS, FRAMES = 16, 32, 16
IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
BOTH = {
    "vocab_size": TOKENS,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    **IDS,
}


def speech_loss(width: int) -> Callable[[nn.Module, Batch], Tensor]:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(input_features=batch.floats(2, FRAMES, width), labels=batch.ids(TOKENS - 4, 2, 4) + 4).loss

    return loss


def family(name: str, loss: Callable[[nn.Module, Batch], Tensor] = language_loss, **config: object) -> Family:
    return Family(name, partial(make, name, **config), one_loss(loss), buffers_mix=True)


MIXING = [
    family(
        "MiniMaxForCausalLM",
        vocab_size=TOKENS,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        **SIZES,
    ),
    family(
        "OpenAIGPTLMHeadModel",
        vocab_size=TOKENS,
        n_positions=16,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    ),
    family(
        "Speech2TextForConditionalGeneration",
        speech_loss(8),
        **BOTH,
        input_feat_per_channel=8,
        conv_channels=WIDTH,
        max_source_positions=64,
        max_target_positions=32,
        conv_kernel_sizes=(3, 3),
    ),
    family(
        "Swinv2ForImageClassification",
        image_loss,
        image_size=8,
        patch_size=2,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=2,
        num_labels=3,
    ),
]
