"""The shapes of the benchmarks: layer sizes of published models. Weights are random (weights.py, write_gguf.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any


@dataclass(frozen=True, slots=True)
class Tensor:
    """One weight, with its name in each format."""

    name: str  # safetensors
    gguf: str
    shape: tuple[int, ...]
    layer: int = -1  # -1: outside the layers

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder-only model: the fields of its config.json, and its tensors."""

    name: str
    model_type: str  # as in config.json
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    head_norms: bool = False
    theta: float = 1e6
    positions: int = 32_768

    def config(self) -> Mapping[str, Any]:
        architecture = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[self.model_type]
        return {
            "architectures": [architecture],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-6,
            "rope_theta": self.theta,
            "hidden_act": "silu",
            "attention_bias": False,
            "torch_dtype": "bfloat16",
        }

    def tensors(self) -> Iterator[Tensor]:
        """All tensors in the order of the file."""
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        yield Tensor("model.embed_tokens.weight", "token_embd.weight", (self.vocab, self.hidden))
        for layer in range(self.layers):
            tensors = [
                ("input_layernorm", "attn_norm", (self.hidden,)),
                ("self_attn.q_proj", "attn_q", (queries, self.hidden)),
                ("self_attn.k_proj", "attn_k", (keys, self.hidden)),
                ("self_attn.v_proj", "attn_v", (keys, self.hidden)),
                ("self_attn.o_proj", "attn_output", (self.hidden, queries)),
                ("post_attention_layernorm", "ffn_norm", (self.hidden,)),
                ("mlp.gate_proj", "ffn_gate", (self.inner, self.hidden)),
                ("mlp.up_proj", "ffn_up", (self.inner, self.hidden)),
                ("mlp.down_proj", "ffn_down", (self.hidden, self.inner)),
            ]
            if self.head_norms:
                tensors += [
                    ("self_attn.q_norm", "attn_q_norm", (self.head_dim,)),
                    ("self_attn.k_norm", "attn_k_norm", (self.head_dim,)),
                ]
            for name, gguf, shape in tensors:
                yield Tensor(f"model.layers.{layer}.{name}.weight", f"blk.{layer}.{gguf}.weight", shape, layer)
        yield Tensor("model.norm.weight", "output_norm.weight", (self.hidden,))
        if not self.tied:
            yield Tensor("lm_head.weight", "output.weight", (self.vocab, self.hidden))

    @property
    def multiplied(self) -> int:
        """The number of weights in the products of each token: all matrices with the head, without the embedding."""
        matrices = sum(tensor.size for tensor in self.tensors() if len(tensor.shape) == 2)
        return matrices if self.tied else matrices - self.vocab * self.hidden

    def operations(self, tokens: int) -> int:
        """Operations for a prompt: products, causal attention, the head for one token. A multiply-add counts as two."""
        head = self.vocab * self.hidden
        scores = tokens * (tokens + 1) // 2
        products = tokens * (self.multiplied - head) + head
        return 2 * products + 4 * scores * self.heads * self.head_dim * self.layers


QWEN3_06B = Shape("Qwen3-0.6B shape", "qwen3", 1024, 3072, 28, 16, 8, 128, 151_936, tied=True, head_norms=True)
QWEN3_8B = Shape("Qwen3-8B shape", "qwen3", 4096, 12_288, 36, 32, 8, 128, 151_936, tied=False, head_norms=True)
LLAMA_8B = Shape("8B Llama shape", "llama", 4096, 14_336, 32, 32, 8, 128, 128_256, tied=False, theta=5e5)

# The layers and calls of Qwen3-0.6B with almost no arithmetic: its time is the overhead of the calls.
HOLLOW = replace(QWEN3_06B, name="28 hollow layers", hidden=64, inner=64, heads=2, kv_heads=1, head_dim=32, vocab=256)

# A very small model, for tests of the programs.
TINY = replace(HOLLOW, name="tiny shape", layers=2, positions=1024)

SHAPES = {"qwen3-0.6b": QWEN3_06B, "qwen3-8b": QWEN3_8B, "llama-8b": LLAMA_8B, "hollow": HOLLOW, "tiny": TINY}
