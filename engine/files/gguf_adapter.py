"""Reads a LoRA adapter in a GGUF file: metadata and tensor directory, no weights.

A factor has the name of its tensor in the base model and an end: `blk.0.attn_v.weight.lora_a` and `….lora_b`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelRefused
from .fields import Fields
from .gguf_model import read_header
from .gguf_values import ALPHA
from .tensor_files import StoredTensor

ENDS = {".lora_a": "a", ".lora_b": "b"}
EMBEDDING = "token_embd.weight"  # its factor A is stored as [vocab, rank]


@dataclass(frozen=True, slots=True)
class GgufAdapter:
    """The validated metadata of an adapter."""

    tensors: Mapping[str, StoredTensor]  # the factors, as [rank, in_features] and [out_features, rank]
    alpha: float  # 0: none
    base: str  # name or address of the base model; empty if the file has none
    base_class: str = ""  # the format has none

    @property
    def warning(self) -> str:
        """The facts about the training that the format does not have."""
        missing = "" if self.alpha else ", and this file has no alpha, so llama.cpp uses the scale 1"
        return (
            f"a GGUF adapter file does not have use_rslora and alpha_pattern of PEFT{missing}; if the adapter was "
            "trained with them, load the folder of PEFT instead"
        )

    def scale(self, module: str, rank: int) -> float:
        """The scale of an adapter of this rank: the adapter adds scale · B(A(x)) to the product of a module."""
        return self.alpha / rank if self.alpha else 1.0


def read_gguf_adapter(file: Path) -> GgufAdapter:
    """Read the header of an adapter file. Raises ModelRefused with the file and the key or the tensor."""
    header = read_header(file)
    fields = Fields(header.metadata, file.name)
    kind = fields.text("general.type", "model")
    if kind != "adapter":
        raise ModelRefused(f"{file.name} is not an adapter: its general.type is {kind!r:.50}", "name an adapter file")
    fields.text("general.architecture")
    method = fields.text("adapter.type")
    if method != "lora":
        raise ModelRefused(f"{file.name} is an adapter of the type {method!r:.50}; only lora is supported")
    if "adapter.alora.invocation_tokens" in fields:
        raise ModelRefused(f"{file.name} is an activated LoRA adapter (adapter.alora), which is not supported")
    alpha = header.metadata.get(ALPHA, 0.0)
    assert isinstance(alpha, float)
    tensors = {}
    for entry in header.tensors:
        shape = entry.shape[::-1]
        if entry.name == f"{EMBEDDING}.lora_a":
            shape = entry.shape
        tensors[entry.name] = StoredTensor(file, entry.dtype, shape, entry.start, entry.stop)
    return GgufAdapter(tensors, alpha, _base(fields))


def _base(fields: Fields) -> str:
    """The base model that the file names."""
    for key in ("repo_url", "name"):
        value = fields.text(f"general.base_model.0.{key}", "")
        if value:
            return value.removeprefix("https://huggingface.co/")
    return ""
