"""Tiny GGUF models with random weights, of many architectures of llama.cpp.

llama.cpp itself tells which tensors an architecture has: it makes a model from the metadata alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

from .gguf_models import quantise, writer

CONTEXT = 512
HIDDEN = 256  # divisible by the largest block of a format
INNER = 512
LAYERS = 4
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
WINDOW = 32  # tokens, in the architectures with a sliding window
EXPERTS, EXPERTS_USED = 4, 2
END = "<|end|>"
MERGE = ("Ġ", "t")
TOKENS = [*sorted(ByteLevel.alphabet()), "".join(MERGE), "<|user|>", "<|assistant|>", END]
VOCAB = len(TOKENS)
TEMPLATE = """\
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""

ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "granite",
    "starcoder2",
    "gptneox",
    "falcon",
    "stablelm",
    "command-r",
    "mpt",
    "mamba",
    "falcon-h1",
    "deepseek2",
)
SLIDING = frozenset({"gemma2", "gemma3", "phi3"})
MIXTURES = frozenset({"qwen3moe", "deepseek2"})
LATENT = frozenset({"deepseek2"})  # attention whose keys and values are projections of one vector (MLA)
LATENT_DIM = 256
RECURRENT = frozenset({"mamba"})
HYBRID = frozenset({"falcon-h1"})  # attention and a recurrent state in every layer
EMBEDDING_SCALES = {"gemma2": 1 / 8, "command-r": 1.0}  # the embeddings are the head too
RECIPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q4_K_M", "Q5_K_S", "Q6_K", "IQ4_NL")


def write_random(folder: Path, architecture: str, recipe: str = "F32", seed: int = 0) -> Path:
    """A model of LAYERS layers in the formats of a recipe of llama-quantize. It has a byte-level vocabulary."""
    exact = folder / f"{architecture}-F32.gguf"
    if not exact.exists():
        _write_exact(exact, architecture, seed)
    if recipe == "F32":
        return exact
    return quantise(exact, folder / f"{architecture}-{recipe}.gguf", recipe)


def _write_exact(file: Path, architecture: str, seed: int) -> None:
    header = file.with_suffix(".header")
    with writer(header, architecture) as out:
        _add_metadata(out, architecture)
    random = np.random.default_rng(seed)
    with writer(file, architecture) as out:
        _add_metadata(out, architecture)
        for name, shape in _tensor_shapes(header).items():
            out.add_tensor(name, _values(random, name, shape) * np.float32(_scale(architecture, name)))
    header.unlink()


def _add_metadata(out: GGUFWriter, architecture: str) -> None:
    out.add_name("random")  # llama.cpp knows some models by their names
    out.add_context_length(CONTEXT)
    out.add_embedding_length(HIDDEN)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(INNER)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_layer_norm_eps(1e-5)
    _add_attention(out, architecture)
    if architecture in MIXTURES:
        out.add_expert_count(EXPERTS)
        out.add_expert_used_count(EXPERTS_USED)
        out.add_expert_feed_forward_length(INNER)
    if architecture in HYBRID:
        out.add_ssm_group_count(1)
    if architecture in RECURRENT | HYBRID:
        out.add_ssm_conv_kernel(4)
        out.add_ssm_inner_size(2 * HIDDEN)
        out.add_ssm_state_size(16)
        out.add_ssm_time_step_rank(HIDDEN // 16)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(TOKENS)
    specials = [gguf.TokenType.CONTROL if token.startswith("<|") else gguf.TokenType.NORMAL for token in TOKENS]
    out.add_token_types(specials)
    out.add_token_merges([" ".join(MERGE)])
    out.add_bos_token_id(TOKENS.index(END))
    out.add_eos_token_id(TOKENS.index(END))
    out.add_add_bos_token(False)
    out.add_chat_template(TEMPLATE)


def _add_attention(out: GGUFWriter, architecture: str) -> None:
    recurrent = architecture in RECURRENT
    out.add_head_count(0 if recurrent else HEADS)
    out.add_head_count_kv(0 if recurrent else 1 if architecture in LATENT else KV_HEADS)
    if recurrent:
        return
    if architecture in LATENT:
        _add_latent_attention(out)
        return
    out.add_key_length(HEAD_DIM)
    out.add_value_length(HEAD_DIM)
    out.add_rope_dimension_count(HEAD_DIM)
    out.add_rope_freq_base(10000.0)
    if architecture in SLIDING:
        out.add_sliding_window(WINDOW)
    if architecture == "gptneox":
        out.add_parallel_residual(True)
    if architecture == "mpt":
        out.add_max_alibi_bias(8.0)
    if architecture in ("command-r", "granite"):
        out.add_logit_scale(0.25 if architecture == "command-r" else 4.0)  # a factor, or a divisor


def _add_latent_attention(out: GGUFWriter) -> None:
    out.add_q_lora_rank(HIDDEN)
    out.add_kv_lora_rank(LATENT_DIM)
    out.add_rope_dimension_count(HEAD_DIM)
    out.add_rope_freq_base(10000.0)
    out.add_key_length(LATENT_DIM + HEAD_DIM)
    out.add_value_length(LATENT_DIM)
    out.add_key_length_mla(LATENT_DIM + HEAD_DIM)
    out.add_value_length_mla(LATENT_DIM)
    out.add_leading_dense_block_count(1)
    out.add_expert_shared_count(1)


class _GgufInit(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p)]


class _Tensor(ctypes.Structure):
    """The first fields of a ggml_tensor."""

    _fields_ = [("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("shape", ctypes.c_int64 * 4)]


def _tensor_shapes(header: Path) -> Mapping[str, tuple[int, ...]]:
    """The tensors that llama.cpp expects of a model with this metadata, with the contiguous dimension last."""
    from llama_cpp import llama_cpp

    ggml = llama_cpp._lib
    ggml.gguf_init_from_file.restype = ctypes.c_void_p
    ggml.gguf_init_from_file.argtypes = [ctypes.c_char_p, _GgufInit]
    ggml.gguf_free.argtypes = [ctypes.c_void_p]
    ggml.ggml_get_name.restype = ctypes.c_char_p
    ggml.ggml_get_name.argtypes = [ctypes.c_void_p]
    shapes: dict[str, tuple[int, ...]] = {}

    @llama_cpp.llama_model_set_tensor_data_t
    def note(tensor: int, _: int | None) -> None:
        sizes = list(_Tensor.from_address(tensor).shape)
        while len(sizes) > 1 and sizes[-1] == 1:
            sizes.pop()
        shapes[ggml.ggml_get_name(tensor).decode()] = tuple(reversed(sizes))

    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 0
    metadata = ggml.gguf_init_from_file(str(header).encode(), _GgufInit(True, None))
    model = llama_cpp.llama_model_init_from_user(metadata, note, None, parameters)
    assert model, f"llama.cpp refuses the metadata of {header}"
    llama_cpp.llama_model_free(model)
    ggml.gguf_free(metadata)
    return {name: shape for name, shape in shapes.items() if not _is_optional(name)}


def _is_optional(name: str) -> bool:
    """Scales of formats that these models do not use, and a stretch of the rotation."""
    return name.endswith("scale") or name.startswith("rope_")


def _scale(architecture: str, name: str) -> float:
    """A factor of a tensor. Embeddings are as large as the outputs of layers, so that next tokens differ."""
    if name == "token_embd.weight":
        return EMBEDDING_SCALES.get(architecture, 8.0)
    return 0.5 if architecture in RECURRENT else 1.0


def _values(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Values for which activations stay so small that every format can hold them."""
    values = random.standard_normal(shape, np.float32)
    if "ssm_a" in name:
        return -np.exp(values)
    if name.endswith("bias"):
        return values / np.float32(8)
    if len(shape) == 1:
        return 1 + values / np.float32(8)
    return values * np.float32(1.6 / shape[-1] ** 0.5)
