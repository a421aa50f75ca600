"""The same weights as a GGUF file: written with the gguf library, quantised by ggml's own code.

`python scripts/bench/write_gguf.py SHAPE RECIPE FILE` needs the packages gguf and llama-cpp-python. Recipes follow
what llama-quantize does for the type of that name. Rows of queries and keys are not reordered for ggml's rotation:
that would change what random weights mean and not how long they take.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from shapes import SHAPES, Shape, Tensor
from weights import DISTINCT, draw

LIBRARIES = Path(llama_cpp.__file__).parent / "lib"
SLICES = 64  # a matrix is quantised in as many parts, side by side


def _uniform(kind: Type) -> Callable[[Shape, Tensor], Type]:
    return lambda shape, tensor: kind


def _is_head(shape: Shape, tensor: Tensor) -> bool:
    return tensor.gguf == ("token_embd.weight" if shape.tied else "output.weight")


def _q4_0(shape: Shape, tensor: Tensor) -> Type:
    return Type.Q6_K if _is_head(shape, tensor) else Type.Q4_0


def _q4_k_m(shape: Shape, tensor: Tensor) -> Type:
    """Six bits for the head, and for values and down projections of the first and last eighth and every third layer."""
    eighth, layer = shape.layers // 8, tensor.layer
    wide = layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2
    six = _is_head(shape, tensor) or (wide and ("attn_v." in tensor.gguf or "ffn_down." in tensor.gguf))
    return Type.Q6_K if six else Type.Q4_K


RECIPES: Mapping[str, Callable[[Shape, Tensor], Type]] = {
    "bf16": _uniform(Type.BF16),
    "q8_0": _uniform(Type.Q8_0),
    "q4_0": _q4_0,
    "q4_k_m": _q4_k_m,
}


def quantise(values: NDArray[np.uint16], kind: Type, pool: ThreadPoolExecutor) -> NDArray[np.uint8]:
    """Bits of bfloat16 [outs, ins] -> ggml's blocks [outs, bytes]."""
    if kind == Type.BF16:
        return values.view(np.uint8)
    outs, ins = values.shape
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    out = np.empty((outs, ins // per_block * block_bytes), np.uint8)

    def part(start: int, stop: int) -> None:
        floats = np.ascontiguousarray((values[start:stop].astype(np.uint32) << np.uint32(16)).view(np.float32))
        written = _ggml.ggml_quantize_chunk(
            int(kind), floats.ctypes.data, out[start:stop].ctypes.data, 0, stop - start, ins, None
        )
        assert written == out[start:stop].nbytes

    bounds = np.linspace(0, outs, SLICES + 1).astype(int).tolist()
    list(pool.map(part, bounds[:-1], bounds[1:]))
    return out


def write(shape: Shape, recipe: str, file: Path) -> None:
    """Left alone if it is there already."""
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, shape.model_type)
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
    kept: dict[tuple[str, int, Type], NDArray[np.uint8]] = {}
    with ThreadPoolExecutor() as pool:
        for tensor, values in draw(shape):
            if len(tensor.shape) == 1:
                writer.add_tensor(tensor.gguf, (values.astype(np.uint32) << np.uint32(16)).view(np.float32))
                continue
            kind = RECIPES[recipe](shape, tensor)
            same = (tensor.gguf.split(".")[-2], tensor.layer % DISTINCT if tensor.layer >= 0 else -1, kind)
            if same not in kept:
                kept[same] = quantise(values, kind, pool)
            writer.add_tensor(tensor.gguf, kept[same], raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(file)


_ggml = ctypes.CDLL(str(LIBRARIES / "libggml-base.so"))
_ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
_ggml.ggml_quantize_chunk.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_void_p,
]

if __name__ == "__main__":
    write(SHAPES[sys.argv[1]], sys.argv[2], Path(sys.argv[3]))
