"""The kernels of the Triton products, compiled for every target."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_compile import TARGETS, Build, Target, compile_for, often, spilled

from localllm.kernels.triton import round_rows, small_batch, small_batch_transposed, tiled, widen

pytestmark = [pytest.mark.compile, pytest.mark.timeout(300)]

CONSUMER = 99 << 10  # bytes of shared memory of a program on consumer GPUs
ALL = [Target("cuda", 86, 32, CONSUMER), Target("cuda", 89, 32, CONSUMER), *TARGETS]
NUMBERS = dict.fromkeys(
    ("rows", "out_features", "in_features", "subs", "sub", "x_stride", "pitch", "start", "stop", "share"),
    "i32",
)
EVEN = frozenset(("out_features", "in_features", "subs", "sub", "x_stride", "pitch", "share"))
PLAIN, ACROSS = {"scale": "*fp16", "zero": "*u8"}, {"scale": "*i32", "zero": "*i32"}
FP32 = {"scale": "*fp32", "zero": "*fp32"}
RECORDS: dict[str, tuple[dict[str, str], bool, str]] = {  # types of scale and zero point, whether int4, RECORDS
    "transposed": (ACROSS, True, "transposed"),
    "by_group": (ACROSS, True, "by_group"),
    "by_half": (ACROSS, True, "by_half"),
    "int4": (PLAIN, True, "plain"),
    "fp8": (FP32, False, "plain"),
    "mxfp4": ({"scale": "*u8", "zero": "*u8"}, True, "exponents"),
}


def small_batch_builds(target: Target) -> Iterator[Build]:
    """Builds with the sizes of blocks_of: the group sizes of real models, every dtype of activations, and packed
    weights with even and odd shapes."""
    groups = {"by_group": (32, 64, 128, 4096), "int4": (64, 128), "fp8": (64, 128, 4096)}
    for label, per_label in groups.items():
        types, is_int4, records = RECORDS[label]
        for group in per_label:
            yield _small_batch(target, label, "int4" if is_int4 else "fp8", types, records, group, "*bf16")
    for x in ("*fp16", "*fp32"):
        yield _small_batch(target, "by_group", "int4", ACROSS, "by_group", 64, x)
        yield _small_batch(target, "fp8", "fp8", FP32, "plain", 4096, x)
    yield _small_batch(target, "int8", "int8", FP32, "plain", 4096, "*i8")
    yield _small_batch(target, "by_group", "int4", ACROSS, "by_group", 64, "*bf16", even=False)
    yield _small_batch(target, "fp8", "fp8", FP32, "plain", 128, "*bf16", even=False)
    yield _small_batch(target, "int8", "int8", FP32, "plain", 4096, "*i8", even=False)


def _small_batch(
    target: Target, label: str, fmt: Any, types: dict[str, str], records: str, sub: int, x: str, even: bool = True
) -> Build:
    n, k, unroll, warps, stages = small_batch.blocks_of(
        fmt, sub, 4096 if even else 4000, x == "*fp32", target.device.target
    )
    pointers = {"out": "*fp32" if x == "*i8" else x, "x": x, "bias": "*fp32", "counters": "*i32", "x_scale": "*fp32"}
    pointers |= {"data": "*i8" if fmt == "int8" else "*u8", "partial": "*i32" if fmt == "int8" else "*fp32", **types}
    constants = {
        "FORMAT": fmt, "RECORDS": records, "ONE": sub == 4096, "EVEN": even, "SPLIT": True, "HAS_BIAS": True,
        "ASSEMBLY": target.device.target.assembly, "UNROLL": unroll, "BLOCK_M": small_batch.MAX_ROWS, "BLOCK_N": n,
        "BLOCK_K": k,
    }  # fmt: skip
    name = f"small-batch-{label}-{sub}-{x[1:]}{'' if even else '-odd'}"
    kernel = small_batch.small_batch_kernel
    return Build(name, kernel, {**NUMBERS, **pointers}, constants, warps, stages, EVEN if even else frozenset())


def tiled_builds(target: Target) -> Iterator[Build]:
    """Products of one row and of many, with a bias and shares."""
    for label, rows, x in (
        ("by_half", 16, "*bf16"), ("by_half", 64, "*bf16"), ("by_half", 64, "*fp16"), ("fp8", 64, "*bf16"),
    ):  # fmt: skip
        types, is_int4, records = RECORDS[label]
        m, n, warps, stages, weights_first = tiled.blocks_of(rows, is_int4, target.device)
        pointers = {"out": x, "x": x, "data": "*u8", "bias": "*fp32", "partial": "*fp32", "counters": "*i32", **types}
        constants = {
            "NIBBLES": is_int4, "RECORDS": records, "SPLIT": True, "HAS_BIAS": True,
            "ASSEMBLY": target.device.target.assembly, "WEIGHTS_FIRST": weights_first,
            "BLOCK_M": m, "BLOCK_N": n,
        }  # fmt: skip
        name = f"tiled-{label}-{rows}-{x[1:]}"
        yield Build(name, tiled.tiled_kernel, {**NUMBERS, **pointers}, constants, warps, stages, EVEN)


def turned_build() -> Build:
    """A build for weights of the CUDA library, which AMD GPUs do not use."""
    types = {"out": "*bf16", "x": "*bf16", "data": "*u8", "records": "*i32", "bias": "*fp32"}
    constants = {"HAS_BIAS": True, "BLOCK_M": 16, "BLOCK_N": small_batch_transposed.BLOCK_N, "BLOCK_K": 64}
    kernel = small_batch_transposed.small_batch_transposed_kernel
    return Build(
        "transposed",
        kernel,
        {**NUMBERS, **types},
        constants,
        small_batch_transposed.WARPS,
        small_batch_transposed.STAGES,
    )


def widening(label: str) -> Build:
    types, is_int4, records = RECORDS[label]
    constants = {"NIBBLES": is_int4, "RECORDS": records, "BLOCK_N": widen.BLOCK, "BLOCK_K": 64}
    return Build(f"widen-{label}", widen._widen, {**NUMBERS, "out": "*bf16", "data": "*u8", **types}, constants, 4, 3)


def rounding() -> Iterator[Build]:
    numbers = dict.fromkeys(("rows", "in_features", "out_features", "x_stride"), "i32")
    floats = dict.fromkeys(("scales", "row_scale", "scale", "bias"), "*fp32")
    shared = {**numbers, **floats, "x": "*bf16"}
    of_rows, of_groups, back = (getattr(round_rows, name) for name in ("_round_rows", "_round_groups", "_scale_back"))
    yield Build("round-rows", of_rows, {**shared, "out": "*i8"}, {"BLOCK": 2048}, 8, 3)
    for group in (32, 128):
        yield Build(
            f"round-{group}", of_groups, {**shared, "out": "*bf16"}, {"GROUP": group, "ROWS": 2048 // group}, 4, 3
        )
    sums = {**shared, "sums": "*i32", "out": "*bf16"}
    yield Build("scale-back", back, sums, {"HAS_BIAS": True, "BLOCK": 2048}, 8, 3)


# Products of few rows in tests that are not slow.
SOME = ("tiled-by_half-64-bf16", "small-batch-by_group-64-bf16", "small-batch-int8-4096-i8", "small-batch-fp8-128-bf16")


def runs() -> Iterator[Any]:
    for target in ALL:
        for build in (
            *small_batch_builds(target),
            *tiled_builds(target),
            *([turned_build()] * (target.backend == "cuda")),
            *map(widening, RECORDS),
            *rounding(),
        ):
            is_few = build.label.startswith(("small-batch", "tiled"))
            quick = often(target, build.label) and (build.label in SOME or not is_few)
            yield pytest.param(target, build, id=f"{target}-{build.label}", marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize(("target", "build"), list(runs()))
def test_compiles(target: Target, build: Build, tmp_path: Path) -> None:
    compiled = compile_for(target, build)
    assert compiled.metadata.shared <= min(target.shared, CONSUMER)
    assert spilled(target, compiled, tmp_path) == 0
