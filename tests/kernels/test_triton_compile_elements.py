"""The Triton kernels of sampling, norms, activations, rotation, cache writes and recurrent layers, compiled for every
target."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_compile import POINTERS, TARGETS, Build, Target, compile_for, parameters, spilled

from localllm.kernels.triton import activation, draw, kv, norm, rope, sampling, state

pytestmark = [pytest.mark.compile, pytest.mark.timeout(300)]

FLOATS, INTEGERS, LONG = "*fp32", "*i32", "*i64"
VOCAB_BLOCKS, VOCAB_CHUNKS = 2048, 128  # of 151,936 and of 256k tokens, rounded up
TYPES = {
    **dict.fromkeys(("logits", "temperature", "top_p", "min_p", "noisy", "maxima", "sums", "chosen", "top"), FLOATS),
    **dict.fromkeys(("values", "repetition", "presence", "frequency", "cos", "sin"), FLOATS),
    **dict.fromkeys(("seed_low", "seed_high", "position", "top_k", "keys", "ids", "noisy_ids", "listed"), INTEGERS),
    **dict.fromkeys(("words", "ends", "carried", "drawn"), INTEGERS),
    **dict.fromkeys(("rows", "tokens", "in_prompt", "in_output", "top_tokens", "slots"), LONG),
    **dict.fromkeys(("x", "residual", "weight", "qkv", "query", "query_norm", "key_norm"), "*bf16"),
    **dict.fromkeys(("key_pages", "value_pages"), "*bf16"),
    **dict.fromkeys(("eps", "offset"), "fp32"),
}
EVEN = frozenset({"stride", "vocab", "dim", "row_stride", "head_stride", "token_stride"})


def build(label: str, kernel: Any, out: str, warps: int = 4, types: dict[str, str] | None = None, **constants: Any):
    known = {**TYPES, "out": out, **(types or {})}
    arguments = {name: known.get(name, "i32") for name in kernel.arg_names}
    return Build(label, kernel, arguments, constants, warps, even=EVEN)


def sampling_builds() -> Iterator[Build]:
    sizes = {"CHUNK": draw.CHUNK, "BLOCK": draw.BLOCK}
    yield build("all", draw._survey, LONG, TOP_K=True, TOP_P=True, **sizes)
    sizes |= {"GROUP": draw.GROUP, "CHUNKS": VOCAB_CHUNKS, "BLOCKS": VOCAB_BLOCKS}
    yield build("all", draw._choose, LONG, draw.WARPS, TOP_K=True, TOP_P=True, MIN_P=True, **sizes)
    yield build("top-k", draw._choose, LONG, draw.WARPS, TOP_K=True, TOP_P=False, MIN_P=False, **sizes)
    yield build("span", sampling._largest, LONG, SPAN=sampling.SPAN)
    yield build("span", sampling._larger, LONG, 1, CHUNKS=64)
    yield build("span", sampling._mask, LONG, SPAN=sampling.SPAN)
    yield build("chunk", sampling._add_up, LONG, CHUNK=sampling.CHUNK, BLOCK=sampling.BLOCK)
    yield build("vocab", sampling._likeliest, LONG, BLOCK=sampling.BLOCK, BLOCKS=VOCAB_BLOCKS)
    yield build("entries", sampling._bias, LONG, ENTRIES=sampling.ENTRIES)
    yield build("entries", sampling._penalise, LONG, ENTRIES=sampling.ENTRIES)
    yield build("entries", sampling._carry, LONG, types={"tokens": INTEGERS, "rows": "i32"}, ENTRIES=sampling.ENTRIES)


def element_builds(target: Target) -> Iterator[Build]:
    bf16 = "*bf16"
    yield build("add-rms", norm._normalise, bf16, norm._warps(4096), DIM=4096)
    yield build("widest", norm._normalise, bf16, norm._warps(norm.MAX_DIM), DIM=norm.MAX_DIM)
    yield build("rms", norm._normalise, FLOATS, 4, {"x": FLOATS, "weight": FLOATS}, residual=None, DIM=1024)
    for kind in range(3):
        yield build(f"kind-{kind}", activation._gate, bf16, KIND=kind, SPAN=activation.SPAN)
    yield build("interleaved", rope._rotate, bf16, 1, NEOX=False, DIM=128)
    yield build("neox", kv._append, bf16, 1, NEOX=True, DIM=128)
    if fp8 := target.device.target.fp8:
        pages = dict.fromkeys(("key_pages", "value_pages"), POINTERS[fp8])
        yield build("float8", kv._append, bf16, 1, pages, NEOX=False, DIM=256)


def state_builds() -> Iterator[Build]:
    bf16 = "*bf16"
    names = "states rates dt_bias skip"
    types = dict.fromkeys(names.split(), FLOATS) | dict.fromkeys(("starts", "contexts", "slots"), INTEGERS)
    types |= dict.fromkeys(("gate", "step", "beta", "bias"), bf16) | {
        "dt_min": "fp32",
        "dt_max": "fp32",
        "row_of": LONG,
    }
    conv = {"CHANNELS": state.CHANNELS, "WIDTH": 4}
    yield build("decode", state._convolve, bf16, types=types, row_of=None, GATED=False, **conv)
    yield build("prefill", state._convolve, bf16, types=types, GATED=True, **conv)
    yield build("prefill", state._keep, bf16, types=types, GATED=True, **conv)
    scan = {"KEYS": 128, "COLUMNS": state.NUMBERS // 128}
    yield build("delta", state._scan, bf16, types=types, skip=None, **scan)
    yield build("ssd", state._scan, bf16, types=types, beta=None, **scan)
    yield build("widest", state._normalise_gated, bf16, 16, types, GATE_FIRST=True, DIM=state.MAX_DIM)


RUNS = [
    (target, one)
    for target in TARGETS
    for make in (sampling_builds(), element_builds(target), state_builds())
    for one in make
]


@pytest.mark.parametrize(("target", "build"), parameters(RUNS))
def test_compiles(target: Target, build: Build, tmp_path: Path) -> None:
    compiled = compile_for(target, build)
    assert compiled.metadata.shared <= target.shared
    assert spilled(target, compiled, tmp_path) == 0
