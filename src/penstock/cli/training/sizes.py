"""How large the tensors of a step are: what decides whether logits are made whole, and activations kept.

Estimates from a configuration alone, before anything is built. They are of the layers that nearly all causal language
models have: attention, and a gated product of two matrices.
"""

from dataclasses import dataclass
from typing import Any

#: What a layer keeps for its backward: tensors as wide as the model (inputs of two norms, two sums), as its heads
#: (queries, keys, values, turned and not, and what attention makes), and as its inner product. Counted for Llama; a
#: quarter less for GPT-NeoX, a third more for Qwen3, which norms its heads. Korthikanti et al. ("Reducing Activation
#: Recomputation", 2022) have 34 bytes of bf16 per element for GPT.
_OF_WIDTH, _OF_HEADS, _OF_INNER = 4, 6, 4
_FP32_BYTES = 4


@dataclass(frozen=True)
class StepSizes:
    """Bytes of what a micro-batch has on the device.

    Attributes:
        logits_bytes: the logits, in fp32, which the loss reads.
        largest_bytes: the largest other tensor: the embedding, or what is inside of a layer.
        kept_bytes: what forward keeps for backward, of all layers.
        recomputed_bytes: what it keeps where each layer is computed again: its input, and all of one layer.
    """

    logits_bytes: int
    largest_bytes: int
    kept_bytes: int
    recomputed_bytes: int

    @property
    def logits_are_largest(self) -> bool:
        """Tell whether no tensor of a step would be as large as its logits."""
        return self.logits_bytes > self.largest_bytes


def step_sizes(config: Any, *, vocab_size: int, batch_size: int, seq_length: int, itemsize: int) -> StepSizes | None:
    """Estimate the sizes of a micro-batch.

    Arguments:
        config: the transformers configuration of a language model.
        vocab_size: rows of the embedding.
        batch_size: sequences of a micro-batch.
        seq_length: tokens of a sequence.
        itemsize: bytes of an element in the compute dtype.

    Returns:
        The sizes; `None` where the configuration does not say how wide or how deep the model is.
    """
    text = config.get_text_config()
    width, layers = getattr(text, "hidden_size", None), getattr(text, "num_hidden_layers", None)
    if not (isinstance(width, int) and isinstance(layers, int)):
        return None
    inner = getattr(text, "intermediate_size", None)
    inner = inner if isinstance(inner, int) else 4 * width
    heads, of_head = getattr(text, "num_attention_heads", None), getattr(text, "head_dim", None)
    heads_width = heads * of_head if isinstance(heads, int) and isinstance(of_head, int) else width
    tokens = batch_size * seq_length
    layer_bytes = tokens * (_OF_WIDTH * width + _OF_HEADS * heads_width + _OF_INNER * inner) * itemsize
    input_bytes = tokens * width * itemsize
    return StepSizes(
        logits_bytes=tokens * vocab_size * _FP32_BYTES,
        largest_bytes=max(vocab_size * width, tokens * max(width, inner)) * itemsize,
        kept_bytes=layers * layer_bytes,
        recomputed_bytes=layers * input_bytes + layer_bytes,
    )
