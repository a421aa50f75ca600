"""Metal kernels: their sources compiled as C++ and run with one thread a SIMD group, since there is no Metal in CI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx", reason="mlx is not installed")

import mlx.core as mx

from localllm.kernels.metal import rope_store as rope_op
from localllm.kernels.metal import swiglu as op

from .emulation import execute
from .test_mlx_rope_store import CASES, DTYPES, Case, Given, check, given

HARNESS = """
#include <cmath>
using uint = uint32_t;
using std::exp;
using T = float;
constexpr uint INS = {ins}, OUTS = {outs}, CHOICES = {choices};
struct {{ uint x, y, z; }} thread_position_in_grid;
const uint thread_index_in_simdgroup = 0, threads_per_simdgroup = 1;
float simd_sum(float x) {{ return x; }}
int main() {{
{reads}
  float* out = new float[{pairs} * OUTS];
  for (thread_position_in_grid.z = 0; thread_position_in_grid.z < {pairs}; thread_position_in_grid.z++)
    for (thread_position_in_grid.y = 0; thread_position_in_grid.y < OUTS; thread_position_in_grid.y++) {{
{source}
    }}
  fwrite(out, 4, {pairs} * OUTS, fopen("out", "wb"));
}}
"""


def emulated(folder: Path, x: np.ndarray, chosen: np.ndarray, gate: op.Experts, up: op.Experts) -> np.ndarray:
    tensors = dict(zip(op.INPUTS, (x, chosen.astype(np.uint32), *map(np.array, (*gate, *up))), strict=True))
    kinds = {"u": "uint", "f": "float"}
    reads = []
    for name, values in tensors.items():
        values.tofile(folder / name)
        reads.append(f'  auto {name} = read<{kinds[values.dtype.kind]}>("{name}", {values.size});')
    outs, (tokens, choices) = gate.weight.shape[1], chosen.shape
    code = HARNESS.format(
        ins=x.shape[1], outs=outs, choices=choices, pairs=tokens * choices, reads="\n".join(reads), source=op.SOURCE
    )
    execute(code, folder)
    return np.fromfile(folder / "out", np.float32).reshape(tokens, choices, outs)


def experts(key: Any, count: int, outs: int, ins: int) -> op.Experts:
    return op.Experts(*mx.quantize(mx.random.normal((count, outs, ins), key=key) / ins**0.5, op.GROUP, op.BITS))


@pytest.mark.emulated
@pytest.mark.parametrize(("tokens", "choices", "outs", "ins"), [(1, 1, 8, 64), (3, 2, 16, 192), (5, 4, 40, 128)])
def test_swiglu_source_equals_the_reference(tmp_path: Path, tokens: int, choices: int, outs: int, ins: int) -> None:
    keys = mx.random.split(mx.random.key(tokens), 3)
    gate, up = experts(keys[0], 6, outs, ins), experts(keys[1], 6, outs, ins)
    x = mx.random.normal((tokens, ins), key=keys[2])
    chosen = np.random.default_rng(tokens).integers(0, 6, (tokens, choices))
    expected = np.array(op.reference(x, gate, up, mx.array(chosen)))
    found = emulated(tmp_path, np.array(x), chosen, gate, up)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


ROPE_HARNESS = """
#include <cmath>
using uint = uint32_t;
struct uint3 { uint x, y, z; };
namespace metal {
using std::exp2;
namespace fast {
using std::cos;
using std::sin;
}
}
#define device
int main() {
"""


def rope_emulated(folder: Path, case: Case, asked: Given) -> rope_op.Stored:
    """What the source writes; thread by thread, some more than there is work for."""
    kinds = {mx.float32: "float", mx.float16: "_Float16", mx.bfloat16: "bfloat16", mx.int32: "int32_t"}
    inputs = dict(zip(rope_op.INPUTS, asked, strict=True))
    if case.rope.freqs is not None:
        inputs["freqs"] = case.rope.freqs
    body = [f"using T = {kinds[asked.q.dtype]};"]
    for name, x in inputs.items():
        new = name in ("q", "k", "v")  # heads lie together in what projections answer
        memory = mx.contiguous(x.transpose(0, 2, 1, 3) if new else x)
        np.array(memory.view(mx.uint16) if memory.itemsize == 2 else memory).tofile(folder / name)
        body.append(f'auto {name} = read<{kinds[x.dtype]}>("{name}", {x.size});')
        if x.ndim == 4:
            _, heads, columns, dim = x.shape
            body.append(f"const int64_t {name}_strides[] = {{{heads * columns * dim}, {columns * dim}, {dim}, 1}};")
    sizes = {"HEADS": case.heads, "KV_HEADS": case.kv_heads, "DIM": case.dim, "VALUE_DIM": case.value_dim}
    for name, size in (*sizes.items(), ("DIMS", case.rope.dims), ("TRADITIONAL", int(case.rope.traditional))):
        body.append(f"constexpr int {name} = {size};")
    body.append(f"T* out = new T[{asked.q.size}];")
    pairs, slots = max(case.dim, case.value_dim) // 2, case.heads + 2 * case.kv_heads
    body += [f"for (uint z = 0; z < {case.rows}; z++)", f"for (uint y = 0; y < {slots + 3}; y++)"]
    body += [f"for (uint x = 0; x < {pairs}; x++) [&](uint3 thread_position_in_grid) {{"]
    body += [rope_op.METAL, rope_op.source(case.rope), "}(uint3{x, y, z});"]
    outs = {"out": asked.q, "keys": asked.keys, "values": asked.values}
    body += [f'fwrite({name}, sizeof(T), {x.size}, fopen("{name}", "wb"));' for name, x in outs.items()]
    execute(ROPE_HARNESS + "\n".join(body) + "\n}\n", folder, "-fsanitize=address,undefined")

    def told(name: str, like: mx.array) -> mx.array:
        kind = np.uint16 if like.itemsize == 2 else np.uint32
        return mx.array(np.fromfile(folder / name, kind)).view(like.dtype).reshape(like.shape)

    return rope_op.Stored(*(told(name, x) for name, x in outs.items()))


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_rope_store_source_writes_one_column(tmp_path: Path, name: str, dtype: str) -> None:
    asked = given(CASES[name], DTYPES[dtype])
    check(CASES[name], asked, rope_emulated(tmp_path, CASES[name], asked))
