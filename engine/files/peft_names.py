"""The names of modules in files of PEFT -> the names that they have in a causal language model.

The names depend on the class that was trained: a causal language model, its layers alone (AutoModel), or a multimodal
model, whose text model is a part of it.
"""

from __future__ import annotations

import re

PREFIX = "base_model.model."  # the prefix of every tensor name in PEFT's files
# Ends of tensor names, for the factors A and B.
ENDS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    # A trainer that saves the weights without PEFT keeps the name that the adapter has in memory. PEFT reads it too.
    ".lora_A.default.weight": "a",
    ".lora_B.default.weight": "b",
    ".lora_embedding_A.default": "a",
    ".lora_embedding_B.default": "b",
}

_WRAPPERS = r"(?:(?:model|language_model|text_model)\.)*"
_IN_MODEL = re.compile(rf"{_WRAPPERS}(layers\.\d+\..+|(?:embed_tokens|per_layer_model_projection)(?:\..+)?)")
_HEAD = re.compile(rf"{_WRAPPERS}(lm_head(?:\..+)?)")
# Parts of multimodal models that see no text: they change no answer to a text.
_OTHER_PARTS = re.compile(
    r"(?:model\.)?(?:vision_tower|vision_model|visual|multi_modal_projector|mm_projector|audio_tower|connector)\."
)


def text_module(name: str) -> str:
    """The name of a module, or of its tensor, in a causal language model; empty for a part that sees no text."""
    if _OTHER_PARTS.match(name):
        return ""
    inner = _IN_MODEL.fullmatch(name)
    if inner:
        return f"model.{inner[1]}"
    head = _HEAD.fullmatch(name)
    return head[1] if head else name
