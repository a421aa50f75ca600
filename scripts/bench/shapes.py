"""The shapes of the benchmarks: layer sizes of published models. The weights are random (weights.py, gguf_file.py)."""

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
    fill: float = 1.0  # the values of a vector

    @property
    def size(self) -> int:
        return prod(self.shape)

    def stored(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The names and shapes in safetensors files, in the order of the values."""
        if "*" not in self.name:
            yield self.name, self.shape
            return
        for expert in range(self.shape[0]):
            yield self.name.replace("*", str(expert)), self.shape[1:]


@dataclass(frozen=True, slots=True)
class Delta:
    """The recurrent layers (Gated DeltaNet) of a hybrid model. The last of every `interval` layers has attention, with
    gated outputs and a rope in a quarter of the dimensions."""

    key_heads: int
    value_heads: int
    dim: int = 128  # of keys and of values
    interval: int = 4
    width: int = 4  # of the convolution

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.dim

    def config(self) -> Mapping[str, Any]:
        return {
            "full_attention_interval": self.interval,
            "linear_conv_kernel_dim": self.width,
            "linear_key_head_dim": self.dim,
            "linear_value_head_dim": self.dim,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "partial_rotary_factor": 0.25,
        }


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
    experts: int = 0  # 0: no mixture of experts; else `inner` is that of an expert
    top_k: int = 0  # experts per token
    shared: int = 0  # inner size of a shared expert with a gate; 0: no shared expert
    positions: int = 32_768
    delta: Delta | None = None  # None: all layers have attention

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
            "rope_theta": 1e6,
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
        return config | dict(self.delta.config() if self.delta else {})

    def is_recurrent(self, layer: int) -> bool:
        return self.delta is not None and (layer + 1) % self.delta.interval > 0

    def tensors(self) -> Iterator[Tensor]:
        """All tensors in the order of the file."""
        yield Tensor("model.embed_tokens.weight", "token_embd.weight", (self.vocab, self.hidden))
        for layer in range(self.layers):
            for name, gguf, shape in self._layer(layer):
                end = "" if gguf in PARAMETERS else ".weight"
                yield Tensor(
                    f"model.layers.{layer}.{name}{end}", f"blk.{layer}.{gguf}{end}", shape, layer, self._fill(name)
                )
        yield Tensor("model.norm.weight", "output_norm.weight", (self.hidden,), fill=self._fill("norm"))
        if not self.tied:
            yield Tensor("lm_head.weight", "output.weight", (self.vocab, self.hidden))

    def _fill(self, name: str) -> float:
        """The values of a vector. A hybrid model adds 1 to the weights of norms, except those of recurrent layers."""
        if name.endswith("A_log"):
            return LONG_MEMORY
        return 0.0 if self.delta and "linear_attn" not in name else 1.0

    def _layer(self, layer: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        yield "input_layernorm", "attn_norm", (self.hidden,)
        yield from self._recurrent(self.delta) if self.delta and self.is_recurrent(layer) else self._attention()
        after = "post_attention_norm" if self.delta else "ffn_norm"
        yield "post_attention_layernorm", after, (self.hidden,)
        if not self.experts:
            yield from self._mlp("mlp.", "", self.inner)
            return
        yield "mlp.gate", "ffn_gate_inp", (self.experts, self.hidden)
        yield from self._mlp("mlp.experts.*.", "_exps", self.inner, self.experts)
        if self.shared:
            yield from self._mlp("mlp.shared_expert.", "_shexp", self.shared)
            yield "mlp.shared_expert_gate", "ffn_gate_inp_shexp", (1, self.hidden)

    def _attention(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        yield "self_attn.q_proj", "attn_q", (queries * (2 if self.delta else 1), self.hidden)
        yield "self_attn.k_proj", "attn_k", (keys, self.hidden)
        yield "self_attn.v_proj", "attn_v", (keys, self.hidden)
        yield "self_attn.o_proj", "attn_output", (self.hidden, queries)
        if self.head_norms:
            yield "self_attn.q_norm", "attn_q_norm", (self.head_dim,)
            yield "self_attn.k_norm", "attn_k_norm", (self.head_dim,)

    def _recurrent(self, delta: Delta) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        values = delta.value_heads * delta.dim
        yield "linear_attn.in_proj_qkv", "attn_qkv", (delta.channels, self.hidden)
        yield "linear_attn.in_proj_z", "attn_gate", (values, self.hidden)
        yield "linear_attn.in_proj_b", "ssm_beta", (delta.value_heads, self.hidden)
        yield "linear_attn.in_proj_a", "ssm_alpha", (delta.value_heads, self.hidden)
        yield "linear_attn.conv1d", "ssm_conv1d", (delta.channels, 1, delta.width)
        yield "linear_attn.A_log", "ssm_a", (delta.value_heads,)
        yield "linear_attn.dt_bias", "ssm_dt.bias", (delta.value_heads,)
        yield "linear_attn.norm", "ssm_norm", (delta.dim,)
        yield "linear_attn.out_proj", "ssm_out", (self.hidden, values)

    def _mlp(self, prefix: str, suffix: str, inner: int, *experts: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        yield f"{prefix}gate_proj", f"ffn_gate{suffix}", (*experts, inner, self.hidden)
        yield f"{prefix}up_proj", f"ffn_up{suffix}", (*experts, inner, self.hidden)
        yield f"{prefix}down_proj", f"ffn_down{suffix}", (*experts, self.hidden, inner)


# A_log. The gated norm divides a result by its length: that of a short memory could be near 0, with large roundings.
LONG_MEMORY = -6.0
PARAMETERS = ("ssm_a", "ssm_dt.bias")  # tensors whose names do not end with weight
ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}

QWEN3_06B = Shape("Qwen3-0.6B shape", "qwen3", 1024, 3072, 28, 16, 8, 128, 151_936, tied=True, head_norms=True)
QWEN3_8B = Shape("Qwen3-8B shape", "qwen3", 4096, 12_288, 36, 32, 8, 128, 151_936, tied=False, head_norms=True)
LLAMA_8B = Shape("8B Llama shape", "llama", 4096, 14_336, 32, 32, 8, 128, 128_256, tied=False)
QWEN3_30B = Shape(
    "Qwen3-30B-A3B shape", "qwen3_moe", 2048, 768, 48, 32, 4, 128, 151_936, tied=False, head_norms=True, experts=128,
    top_k=8,
)  # fmt: skip
# A small mixture of experts: about 0.8 billion weights, 0.15 billion of them per token, without the embedding.
MOE_1B = Shape(
    "1B mixture of experts", "qwen3_moe", 1024, 512, 16, 16, 4, 64, 32_000, tied=True, head_norms=True, experts=32,
    top_k=4,
)  # fmt: skip
# Layers of a mixture of experts with a shared expert, with the experts of Qwen3.6-35B-A3B. The vocabulary is small, so
# that the head takes as small a share of the time as with all layers.
MOE_35B = Shape(
    "8 layers of 35B-A3B", "qwen2_moe", 2048, 512, 8, 16, 2, 128, 32_000, tied=False, experts=256, top_k=8, shared=512
)
QWEN35_08B = Shape(
    "Qwen3.5-0.8B shape", "qwen3_5_text", 1024, 3584, 24, 8, 2, 256, 248_320, tied=True, head_norms=True,
    delta=Delta(16, 16),
)  # fmt: skip
# The vocabulary is small, as that of MOE_35B.
QWEN36_35B = Shape(
    "8 layers of Qwen3.6-35B-A3B", "qwen3_5_moe_text", 2048, 512, 8, 16, 2, 256, 32_000, tied=False, head_norms=True,
    experts=256, top_k=8, shared=512, delta=Delta(16, 32),
)  # fmt: skip
# Very small models, for tests of the programs.
TINY = Shape("tiny shape", "qwen3", 64, 64, 2, 2, 1, 32, 256, tied=True, head_norms=True, positions=1024)
TINY_MOE = replace(TINY, name="tiny mixture of experts", model_type="qwen3_moe", experts=8, top_k=2)
TINY_SHARED = replace(TINY_MOE, name="tiny shared expert", model_type="qwen2_moe", shared=96, head_norms=False)
TINY_HYBRID = replace(TINY, name="tiny hybrid", model_type="qwen3_5_text", layers=4, delta=Delta(2, 4, 16))
TINY_MOE_HYBRID = replace(
    TINY_HYBRID, name="tiny hybrid with experts", model_type="qwen3_5_moe_text", experts=8, top_k=2, shared=96
)

SHAPES = {
    "qwen3-0.6b": QWEN3_06B,
    "qwen3-8b": QWEN3_8B,
    "llama-8b": LLAMA_8B,
    "qwen3-30b-a3b": QWEN3_30B,
    "qwen3-30b-16": replace(QWEN3_30B, name="16 layers of Qwen3-30B-A3B", layers=16),  # loads faster
    "moe-35b-a3b": MOE_35B,
    "moe-1b": MOE_1B,
    "qwen3.5-0.8b": QWEN35_08B,
    "qwen3.6-35b-a3b": QWEN36_35B,
    "tiny": TINY,
    "tiny-moe": TINY_MOE,
    "tiny-shared": TINY_SHARED,
    "tiny-hybrid": TINY_HYBRID,
    "tiny-moe-hybrid": TINY_MOE_HYBRID,
}
