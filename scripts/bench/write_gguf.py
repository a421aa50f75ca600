"""Writes the weights of weights.py as a GGUF file, with the gguf library and the quantisation code of ggml.

`python scripts/bench/write_gguf.py SHAPE RECIPE FILE` needs the packages gguf and llama-cpp-python. A recipe chooses
the formats that llama-quantize chooses for the type of that name. The rows of queries and keys are not in the order of
ggml's rotation, which does not matter for speed. With `--random-blocks` the weights are blocks of random bits with
valid scales: an 8B model takes seconds, and llama-cpp-python is not needed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rows import parser
from shapes import SHAPES, Shape, Tensor
from weights import DISTINCT, bfloat16, draw

SLICES = 64  # of a matrix, which are quantised in parallel
SAMPLE_BYTES = 1 << 25  # of random blocks, which tensors repeat


def _uniform(kind: str) -> Callable[[Shape, Tensor], str]:
    return lambda shape, tensor: kind


def _is_head(shape: Shape, tensor: Tensor) -> bool:
    return tensor.gguf == ("token_embd.weight" if shape.tied else "output.weight")


def _q4_0(shape: Shape, tensor: Tensor) -> str:
    return "Q6_K" if _is_head(shape, tensor) else "Q4_0"


def _q4_k_m(shape: Shape, tensor: Tensor) -> str:
    """Six bits for the head, and for values and down projections of the first and last eighth and every third layer."""
    eighth = shape.layers // 8
    layer = tensor.layer
    wide = layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2
    six = _is_head(shape, tensor) or (wide and ("attn_v." in tensor.gguf or "ffn_down" in tensor.gguf))
    return "Q6_K" if six else "Q4_K"


# Names of gguf.GGMLQuantizationType.
RECIPES: Mapping[str, Callable[[Shape, Tensor], str]] = {
    "bf16": _uniform("BF16"),
    "q8_0": _uniform("Q8_0"),
    "q4_0": _q4_0,
    "q4_k_m": _q4_k_m,
}


def quantise(values: NDArray[np.uint16], kind: int, pool: ThreadPoolExecutor) -> NDArray[np.uint8]:
    """Bits of bfloat16 [..., out_features, in_features] -> blocks of ggml [..., out_features, bytes]."""
    import gguf

    if kind == gguf.GGMLQuantizationType.BF16:
        return values.view(np.uint8)
    *outputs, in_features = values.shape
    values = values.reshape(-1, in_features)
    out_features = len(values)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    out = np.empty((out_features, in_features // per_block * block_bytes), np.uint8)

    library = _ggml()

    def quantise_slice(start: int, stop: int) -> None:
        floats = np.ascontiguousarray((values[start:stop].astype(np.uint32) << np.uint32(16)).view(np.float32))
        written = library.ggml_quantize_chunk(
            int(kind), floats.ctypes.data, out[start:stop].ctypes.data, 0, stop - start, in_features, None
        )
        assert written == out[start:stop].nbytes

    bounds = np.linspace(0, out_features, SLICES + 1).astype(int).tolist()
    list(pool.map(quantise_slice, bounds[:-1], bounds[1:]))
    return out.reshape(*outputs, -1)


def write(shape: Shape, recipe: str, file: Path, random_blocks: bool = False, vocabulary: bool = False) -> None:
    """Write the file, unless it exists. `vocabulary`: with a vocabulary of bytes and unused tokens."""
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".part")
    if random_blocks:
        _write_random(shape, recipe, unfinished, vocabulary)
    else:
        _write_quantised(shape, recipe, unfinished, vocabulary)
    unfinished.rename(file)


def _make_writer(shape: Shape, file: Path, vocabulary: bool) -> Any:
    """A writer of gguf that has the metadata of the model, and no tensors."""
    import gguf

    writer = gguf.GGUFWriter(file, shape.model_type.replace("_", ""))
    if vocabulary:
        _add_vocabulary(writer, shape.vocab)
    else:
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
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.theta)
    writer.add_layer_norm_rms_eps(1e-6)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.top_k)
        writer.add_expert_feed_forward_length(shape.inner)
    return writer


def _add_vocabulary(writer: Any, size: int) -> None:
    """Byte-level tokens without merges, so each ASCII character is a token; other tokens are words."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet())[: size - 2], "ee"]
    tokens += [f"w{number}" for number in range(len(tokens), size - 1)]
    end = "<|end|>"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, end])
    writer.add_token_types([1] * len(tokens) + [3])  # normal, and control
    writer.add_token_merges(["e e"])
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}" + end + "{% endfor %}")


def _write_quantised(shape: Shape, recipe: str, file: Path, vocabulary: bool) -> None:
    import gguf

    writer = _make_writer(shape, file, vocabulary)
    cached: dict[tuple[str, int, int], NDArray[np.uint8]] = {}
    with ThreadPoolExecutor() as pool:
        for tensor, values in draw(shape):
            if tensor.is_plain:
                writer.add_tensor(tensor.gguf, (values.astype(np.uint32) << np.uint32(16)).view(np.float32))
                continue
            kind = gguf.GGMLQuantizationType[RECIPES[recipe](shape, tensor)]
            key = (tensor.gguf.split(".")[-2], tensor.layer % DISTINCT if tensor.layer >= 0 else -1, kind)
            if key not in cached:
                cached[key] = quantise(values, kind, pool)
            writer.add_tensor(tensor.gguf, cached[key], raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the file: its bytes repeat `sample` from its start."""

    sample: NDArray[np.uint8]
    start: int  # in bytes after the header
    stop: int


def _write_random(shape: Shape, recipe: str, file: Path, vocabulary: bool) -> None:
    import gguf

    writer = _make_writer(shape, file, vocabulary)
    samples: dict[tuple[str, int], NDArray[np.uint8]] = {}
    stored: list[Stored] = []
    start = 0
    for tensor in shape.tensors():
        name = RECIPES[recipe](shape, tensor)
        if tensor.is_plain:
            name = "NORM" if len(tensor.shape) == 1 else "F32"
        in_features = tensor.shape[-1]
        if (name, in_features) not in samples:
            samples[name, in_features] = sample_blocks(name, in_features)
        kind = gguf.GGMLQuantizationType["F32" if name == "NORM" else name]
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = in_features // per_block * block_bytes
        size = tensor.size // in_features * row_bytes
        byte_shape = (*tensor.shape[:-1], row_bytes)
        writer.add_tensor_info(tensor.gguf, byte_shape, np.dtype(np.uint8), size, raw_dtype=kind)
        stored.append(Stored(samples[name, in_features], start, start + size))
        start += size + -size % gguf.GGUF_DEFAULT_ALIGNMENT
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    out = writer.fout[0]
    writer.write_padding(out, out.tell())
    out.flush()
    begin = out.tell()
    out.truncate(begin + start)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda tensor: _repeat(out.fileno(), begin, tensor), stored))
    writer.close()


def _repeat(file: int, begin: int, tensor: Stored) -> None:
    data = tensor.sample.reshape(-1)
    for start in range(tensor.start, tensor.stop, len(data)):
        os.pwrite(file, data[: tensor.stop - start], begin + start)


def sample_blocks(name: str, in_features: int) -> NDArray[np.uint8]:
    """Blocks [blocks, bytes] of the ggml format `name` with random bits; ones for "NORM". Their scales are such that a
    product with `in_features` inputs stays finite: their standard deviation is about 1 / sqrt(in_features)."""
    random = np.random.default_rng(0)
    deviation = in_features**-0.5
    if name == "NORM":
        return np.ones((SAMPLE_BYTES // 4, 1), np.float32).view(np.uint8)
    if name in ("F32", "BF16"):
        size = SAMPLE_BYTES // (4 if name == "F32" else 2)
        values = random.standard_normal(size, np.float32) * np.float32(deviation)
        return (values if name == "F32" else bfloat16(values))[:, None].view(np.uint8)
    block_bytes, scales = BLOCKS[name]
    blocks = random.integers(0, 256, (SAMPLE_BYTES // block_bytes, block_bytes), np.uint8)
    for position, scale in scales.items():
        blocks[:, position : position + 2] = np.array([scale * deviation], np.float16).view(np.uint8)
    return blocks


# ggml format -> (bytes of a block, position of a float16 scale in it -> scale for which random values have a standard
# deviation of about 1). Q4_K: the second scale is that of the subtracted minimum; the mean of the values is 0.
BLOCKS: Mapping[str, tuple[int, Mapping[int, float]]] = {
    "Q8_0": (34, {0: 1 / 74}),
    "Q4_0": (18, {0: 1 / 4.6}),
    "Q4_K": (144, {0: 1 / 250, 2: 7.5 / 250}),
    "Q6_K": (210, {208: 1 / 1370}),
}


@cache
def _ggml() -> ctypes.CDLL:
    """ggml's library, from llama-cpp-python."""
    import llama_cpp

    library = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    return library


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("shape", choices=SHAPES)
    arguments.add_argument("recipe", choices=RECIPES)
    arguments.add_argument("file", type=Path)
    arguments.add_argument("--random-blocks", action="store_true", help="random bits instead of quantised weights")
    options = arguments.parse_args()
    write(SHAPES[options.shape], options.recipe, options.file, options.random_blocks)
