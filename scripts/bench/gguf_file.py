"""A GGUF file of random weights: blocks of random bits with valid scales, written with the package gguf.

A recipe chooses the formats that llama-quantize chooses for the type of that name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import exp
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from shapes import LONG_MEMORY, Shape, Tensor
from weights import bfloat16

SAMPLE_BYTES = 1 << 25  # of random blocks, which tensors repeat

# ggml format -> (bytes of a block, position of a float16 scale in it -> scale for which random values have a standard
# deviation of about 1). Q4_K: the second scale is that of the subtracted minimum; the mean of the values is 0.
BLOCKS: Mapping[str, tuple[int, Mapping[int, float]]] = {
    "Q8_0": (34, {0: 1 / 74}),
    "Q4_0": (18, {0: 1 / 4.6}),
    "Q4_K": (144, {0: 1 / 250, 2: 7.5 / 250}),
    "Q6_K": (210, {208: 1 / 1370}),
}
# recipe -> format of most tensors, and format of the head
RECIPES = {"bf16": ("BF16", "BF16"), "q8_0": ("Q8_0", "Q8_0"), "q4_0": ("Q4_0", "Q6_K"), "q4_k_m": ("Q4_K", "Q6_K")}
NORM = "norm"  # the number 1 in float32
DECAY = "decay"  # -exp(A_log) in float32, of ssm_a


class Stored(NamedTuple):
    """A tensor of the file: its bytes repeat `sample` from its start."""

    sample: NDArray[np.uint8]
    start: int  # bytes from the end of the header
    stop: int


def write(shape: Shape, recipe: str, file: Path) -> None:
    """Write the file, unless it exists."""
    import gguf

    if file.exists():
        return
    part = file.with_suffix(".part")
    writer = _make_writer(shape, part)
    stored: list[Stored] = []
    end = 0
    for tensor in shape.tensors():
        name = _format(shape, recipe, tensor)
        kind = gguf.GGMLQuantizationType["F32" if name in (NORM, DECAY) else name]
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = tensor.shape[-1] // per_block * block_bytes
        size = tensor.size // tensor.shape[-1] * row_bytes
        rows = [size for size in tensor.shape[:-1] if size > 1]  # without the input channel of a convolution
        writer.add_tensor_info(tensor.gguf, (*rows, row_bytes), np.dtype(np.uint8), size, raw_dtype=kind)
        stored.append(Stored(sample_blocks(name, tensor.shape[-1]), end, end + size))
        end += size + -size % gguf.GGUF_DEFAULT_ALIGNMENT
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    out = writer.fout[0]
    writer.write_padding(out, out.tell())
    out.flush()
    begin = out.tell()
    out.truncate(begin + end)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda tensor: _repeat(out.fileno(), begin, tensor), stored))
    writer.close()
    part.rename(file)


def _format(shape: Shape, recipe: str, tensor: Tensor) -> str:
    """The ggml format of a tensor. q4_k_m: values and down projections of the first and last eighth of the layers, and
    of every third layer between them, have six bits."""
    if tensor.gguf.endswith("ssm_a"):
        return DECAY
    if len(tensor.shape) == 1:
        return NORM
    if "ffn_gate_inp" in tensor.gguf or "ssm_conv1d" in tensor.gguf:
        return "F32"  # a router, or a convolution
    most, head = RECIPES[recipe]
    if tensor.gguf == ("token_embd.weight" if shape.tied else "output.weight"):
        return head
    eighth = shape.layers // 8
    is_wide = not eighth <= tensor.layer < 7 * shape.layers // 8 or (tensor.layer - eighth) % 3 == 2
    has_six_bits = recipe == "q4_k_m" and tensor.gguf.split(".")[-2] in SIX_BITS and is_wide
    return "Q6_K" if has_six_bits else most


SIX_BITS = ("attn_v", "ffn_down", "ffn_down_exps")


def _make_writer(shape: Shape, file: Path) -> Any:
    """A writer of gguf that has the metadata of the model, and no tensors."""
    import gguf

    name = shape.model_type.removesuffix("_text").replace("_", "")
    writer = gguf.GGUFWriter(file, name)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim // (4 if shape.delta else 1))
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.top_k)
        writer.add_expert_feed_forward_length(shape.inner)
    if shape.shared:
        writer.add_expert_shared_feed_forward_length(shape.shared)
    if shape.delta:
        writer.add_rope_dimension_sections(_rope_sections(shape.head_dim // 8))
        writer.add_full_attention_interval(shape.delta.interval)
        writer.add_ssm_conv_kernel(shape.delta.width)
        writer.add_ssm_state_size(shape.delta.dim)
        writer.add_ssm_group_count(shape.delta.key_heads)
        writer.add_ssm_time_step_rank(shape.delta.value_heads)
        writer.add_ssm_inner_size(shape.delta.value_heads * shape.delta.dim)
    return writer


def _rope_sections(pairs: int) -> list[int]:
    """The pairs of dimensions that the position in time, the row and the column of a picture rotate."""
    side = pairs // 3
    return [pairs - 2 * side, side, side, 0]


def _repeat(file: int, begin: int, tensor: Stored) -> None:
    data = tensor.sample.reshape(-1)
    for start in range(tensor.start, tensor.stop, len(data)):
        os.pwrite(file, data[: tensor.stop - start], begin + start)


@cache
def sample_blocks(name: str, in_features: int) -> NDArray[np.uint8]:
    """Blocks [blocks, bytes] of the ggml format `name` with random bits; ones for NORM. Their scales are such that a
    product with `in_features` inputs stays finite: their standard deviation is about 1 / sqrt(in_features)."""
    random = np.random.default_rng(0)
    deviation = in_features**-0.5
    if name in (NORM, DECAY):
        return np.full((SAMPLE_BYTES // 4, 1), 1 if name == NORM else -exp(LONG_MEMORY), np.float32).view(np.uint8)
    if name in ("F32", "BF16"):
        values = random.standard_normal(SAMPLE_BYTES // 4, np.float32) * np.float32(deviation)
        return (values if name == "F32" else bfloat16(values))[:, None].view(np.uint8)
    block_bytes, scales = BLOCKS[name]
    blocks = random.integers(0, 256, (SAMPLE_BYTES // block_bytes, block_bytes), np.uint8)
    for position, scale in scales.items():
        blocks[:, position : position + 2] = np.array([scale * deviation], np.float16).view(np.uint8)
    return blocks
