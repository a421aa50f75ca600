"""The shapes of the benchmarks: layer sizes of published models. Weights are random (weights.py, write_gguf.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any


@dataclass(frozen=True, slots=True)
class Tensor:
    """One weight, with its name in each format. The weight [experts, out_features, in_features] of a mixture of experts
    is one tensor in GGUF files, and one for each expert in safetensors files."""

    name: str  # safetensors; in the name of experts, * stands for the number of the expert
    gguf: str
    shape: tuple[int, ...]
    layer: int = -1  # -1: outside the layers

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_plain(self) -> bool:
        """Whether the weight is a norm or a router, which GGUF files store in float32."""
        return len(self.shape) == 1 or "ffn_gate_inp" in self.gguf

    def stored(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The names and shapes in safetensors files, in the order of the values."""
        if len(self.shape) < 3:
            yield self.name, self.shape
            return
        for expert in range(self.shape[0]):
            yield self.name.replace("*", str(expert)), self.shape[1:]


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
    experts: int = 0  # 0: no mixture of experts; else `inner` is that of an expert
    top_k: int = 0  # experts per token
    shared: int = 0  # inner size of a shared expert with a gate; 0: no shared expert

    def config(self) -> Mapping[str, Any]:
        config = {
            "architectures": [ARCHITECTURES[self.model_type]],
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
        if self.experts:
            config |= {
                "num_experts": self.experts,
                "num_experts_per_tok": self.top_k,
                "moe_intermediate_size": self.inner,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        if self.shared:
            config |= {"shared_expert_intermediate_size": self.shared, "qkv_bias": False}
        return config

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
                *self._mlp(),
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

    def _mlp(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """The tensors of the MLP of a layer."""
        matrices = _gated_mlp(self.hidden, self.inner)
        if not self.experts:
            return [(f"mlp.{name}_proj", f"ffn_{name}", shape) for name, shape in matrices.items()]
        tensors: list[tuple[str, str, tuple[int, ...]]] = [
            ("mlp.gate", "ffn_gate_inp", (self.experts, self.hidden)),
            *((f"mlp.experts.*.{name}_proj", f"ffn_{name}_exps", (self.experts, *of)) for name, of in matrices.items()),
        ]
        if self.shared:
            shared = _gated_mlp(self.hidden, self.shared)
            tensors += [(f"mlp.shared_expert.{name}_proj", f"ffn_{name}_shexp", of) for name, of in shared.items()]
            tensors.append(("mlp.shared_expert_gate", "ffn_gate_inp_shexp", (1, self.hidden)))
        return tensors

    @property
    def multiplied(self) -> int:
        """The number of weights in the products of each token: all matrices with the head, without the embedding."""
        matrices = 0
        for tensor in self.tensors():
            if len(tensor.shape) == 2:
                matrices += tensor.size
            elif len(tensor.shape) == 3:
                matrices += tensor.size // self.experts * self.top_k
        return matrices if self.tied else matrices - self.vocab * self.hidden

    def operations(self, tokens: int) -> int:
        """Operations for a prompt: products, causal attention, the head for one token. A multiply-add counts as two."""
        head = self.vocab * self.hidden
        scores = tokens * (tokens + 1) // 2
        products = tokens * (self.multiplied - head) + head
        return 2 * products + 4 * scores * self.heads * self.head_dim * self.layers


def _gated_mlp(hidden: int, inner: int) -> Mapping[str, tuple[int, int]]:
    return {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}


ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "llama": "LlamaForCausalLM",
}

QWEN3_06B = Shape("Qwen3-0.6B shape", "qwen3", 1024, 3072, 28, 16, 8, 128, 151_936, tied=True, head_norms=True)
QWEN3_8B = Shape("Qwen3-8B shape", "qwen3", 4096, 12_288, 36, 32, 8, 128, 151_936, tied=False, head_norms=True)
LLAMA_8B = Shape("8B Llama shape", "llama", 4096, 14_336, 32, 32, 8, 128, 128_256, tied=False, theta=5e5)
QWEN3_30B = Shape(
    "Qwen3-30B-A3B shape",
    "qwen3_moe",
    2048,
    768,
    48,
    32,
    4,
    128,
    151_936,
    tied=False,
    head_norms=True,
    experts=128,
    top_k=8,
)
QWEN3_30B_16 = replace(QWEN3_30B, name="16 layers of Qwen3-30B-A3B", layers=16)  # loads faster
# A small mixture of experts: about 0.8 billion weights, 0.15 billion of them per token, without the embedding.
MOE_1B = replace(
    QWEN3_30B, name="1B mixture of experts", hidden=1024, inner=512, layers=16, heads=16, kv_heads=4, head_dim=64,
    vocab=32_000, tied=True, experts=32, top_k=4,
)  # fmt: skip

# Mixtures of experts with a shared expert: some layers with the sizes of Qwen2-57B-A14B, and with the experts of
# Qwen3.6-35B-A3B. The vocabulary is small, so that the head takes as small a share of the time as with all layers.
QWEN2_57B = Shape(
    "6 layers of 57B-A14B", "qwen2_moe", 3584, 2560, 6, 28, 4, 128, 32_000, tied=False, experts=64, top_k=8,
    shared=20_480,
)  # fmt: skip
MOE_35B = Shape(
    "8 layers of 35B-A3B", "qwen2_moe", 2048, 512, 8, 16, 2, 128, 32_000, tied=False, experts=256, top_k=8, shared=512
)

# The layers and calls of Qwen3-0.6B with almost no arithmetic: its time is the overhead of the calls.
HOLLOW = replace(QWEN3_06B, name="28 hollow layers", hidden=64, inner=64, heads=2, kv_heads=1, head_dim=32, vocab=256)

# Very small models, for tests of the programs.
TINY = replace(HOLLOW, name="tiny shape", layers=2, positions=1024)
TINY_MOE = replace(TINY, name="tiny mixture of experts", model_type="qwen3_moe", experts=8, top_k=2)
TINY_SHARED = replace(TINY_MOE, name="tiny shared expert", model_type="qwen2_moe", shared=96, head_norms=False)

SHAPES = {
    "qwen3-0.6b": QWEN3_06B,
    "qwen3-8b": QWEN3_8B,
    "llama-8b": LLAMA_8B,
    "qwen3-30b-a3b": QWEN3_30B,
    "qwen3-30b-16": QWEN3_30B_16,
    "qwen2-57b-a14b": QWEN2_57B,
    "moe-35b-a3b": MOE_35B,
    "moe-1b": MOE_1B,
    "hollow": HOLLOW,
    "tiny": TINY,
    "tiny-moe": TINY_MOE,
    "tiny-shared": TINY_SHARED,
}
