"""The Triton kernels of mixtures of experts, compiled for every target."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_compile import TARGETS, Build, Target, compile_for, often, spilled

from localllm.kernels.ops.moe import Routing
from localllm.kernels.triton import moe, moe_norm_route, moe_one_token, moe_product, moe_route, moe_tiles
from localllm.kernels.triton.widen import Quantised

pytestmark = [pytest.mark.compile, pytest.mark.timeout(300)]

NUMBERS = dict.fromkeys(
    (
        *("tile_count", "first_expert", "end_expert", "out_features", "all_features", "in_features", "subs", "sub"),
        *("x_stride", "out_stride", "pitch"),
    ),
    "i32",
)
EVEN = frozenset(("out_features", "all_features", "in_features", "x_stride", "out_stride", "pitch"))
SPILLING = {(target, "int8-plain-65536") for target in ("sm_80", "sm_100")}  # known: 88 and 40 bytes of a thread
SCALES = {"plain": "*fp32", "transposed": "*i32", "by_group": "*i32", "exponents": "*u8"}


def products(target: Target) -> Iterator[Build]:
    """The products of Qwen3-30B-A3B with few and many choices, for every weight format."""
    for choices in (0, 512, 65536):
        yield product(target, "dense", "plain", 2048, choices)
        yield product(target, "int8", "plain", 2048, choices)
    for choices in (0, 512):
        yield product(target, "int4", "by_group", 64, choices)
        yield product(target, "fp8", "plain", 128, choices)
        yield product(target, "int4", "exponents", 32, choices)
        if target.backend == "cuda":
            yield product(target, "int4", "transposed", 64, choices)


def product(target: Target, fmt: Any, records: Any, sub: int, choices: int) -> Build:
    device = target.device
    weight = Quantised(fmt, torch.empty(0), torch.empty(0), None, 0, 2048, sub, records)
    blocks = moe.blocks_of(weight, choices, 128, torch.bfloat16, device)
    data = {"dense": "*bf16", "int8": "*i8"}.get(fmt, "*u8")
    scale = "*fp32" if fmt in ("fp8", "int8", "dense") else SCALES[records]
    pointers = {"out": "*bf16", "x": "*i8" if fmt == "int8" else "*bf16", "x_scale": "*fp32", "data": data}
    pointers |= {"scale": scale, "zero": scale, "bias": "*fp32", "order": "*i32", "tiles": "*i32", "like": "*bf16"}
    constants = {
        "FORMAT": fmt, "RECORDS": records, "ONE": sub == 2048, "EVEN": True, "HAS_BIAS": True,
        "ASSEMBLY": device.target.assembly, "SORTED": choices > 0, "TOP_K": 8, "GATE": 0, "FROM_CHOICE": True,
        "TO_CHOICE": False, "OVERLAP": device.target.overlaps, "BLOCK_M": blocks.m, "BLOCK_N": blocks.n,
        "BLOCK_K": blocks.k,
    }  # fmt: skip
    label = f"{fmt}-{records}-{choices}"
    kernel = moe_product.grouped_kernel
    return Build(label, kernel, {**NUMBERS, **pointers}, constants, blocks.warps, blocks.stages, EVEN)


def one_token(target: Target) -> Iterator[Build]:
    """The kernels of one token, for targets with descriptors."""
    if not target.device.target.descriptors:
        return
    types = dict.fromkeys(("out", "x", "data"), "*bf16") | {"experts": "*i32", "weights": "*fp32"}
    types |= dict.fromkeys(("hidden", "inner", "pitch"), "i32")
    even = frozenset(("hidden", "inner", "pitch"))
    up = {"IN": 2048, "GATE": 0, "PAIRS": moe_one_token.UP_PAIRS, "BLOCK_K": moe_one_token.UP_INPUTS, "OVERLAP": True}
    down = {"TOP_K": 8, "BLOCK_N": moe_one_token.DOWN_OUTPUTS, "BLOCK_K": 1024, "OVERLAP": True}
    warps = moe_one_token.WARPS
    yield Build("one-token-up", moe_one_token.one_token_up_kernel, types, up, warps, 3, even)
    yield Build("one-token-down", moe_one_token.one_token_down_kernel, types, down, warps, 3, even)
    for records in ("plain", "transposed"):
        fp8 = {"SUB": 128, "ONE": records == "plain", "RECORDS": records, "ASSEMBLY": True}
        here = types | {"data": "*u8", "scale": "*fp32", "subs": "i32"}
        label = f"one-token-%s-fp8-{records}"
        yield Build(label % "up", moe_one_token.one_token_up_fp8_kernel, here, up | fp8, warps, 3, even)
        yield Build(label % "down", moe_one_token.one_token_down_fp8_kernel, here, down | fp8, warps, 3, even)


def tiles(target: Target) -> Iterator[Build]:
    """The products of tiles of 128 rows, of gate_up and of down, for targets with descriptors."""
    if not target.device.target.descriptors:
        return
    weight = Quantised("dense", torch.empty(0), torch.empty(0), None, 0, 2048, 2048)
    blocks = moe.blocks_of(weight, 65536, 128, torch.bfloat16, target.device)
    pointers = dict.fromkeys(("out", "x", "like"), "*bf16") | dict.fromkeys(("order", "tiles"), "*i32")
    even = EVEN | {"width"}
    for gate, block in ((0, f"1,2,{blocks.n // 2},{blocks.k}"), (-1, f"{blocks.n},{blocks.k}")):
        arguments = {**NUMBERS, **pointers, "width": "i32", "weights": f"tensordesc<bf16[{block}]>"}
        constants = {"TOP_K": 8, "GATE": gate, "BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "BLOCK_K": blocks.k}
        for name, height in (("tall", blocks.m), ("low", blocks.m // 2)):
            if gate >= 0:
                constants[name] = None
            else:
                arguments[name] = f"tensordesc<bf16[{height},{blocks.k}]>"
        label = f"tiles-{gate}"
        yield Build(label, moe_tiles.tiles_kernel, arguments, constants, blocks.warps, blocks.stages, even)


def others(target: Target) -> Iterator[Build]:
    overlap = {"OVERLAP": target.device.target.overlaps}
    floats = dict.fromkeys(("weights", "logits", "correction", "y"), "*fp32")
    integers = dict.fromkeys(("experts", "order", "tiles", "ranks", "counts"), "*i32")
    numbers = dict.fromkeys(("stride", "choices", "expert_count", "tile_count", "hidden"), "i32")
    types = {**floats, **integers, **numbers, "scale": "fp32", "out": "*bf16"}
    for label, size in (("router", 32), ("router-512", 64)):
        choice = moe_route.choice_of(Routing(8, "sigmoid", True, 1.0, 8, 4, "top2"), 8 * size, True)
        constants = {name.upper(): value for name, value in choice._asdict().items()}
        yield Build(label, moe_route._route, types, {**constants, **overlap}, choice.warps(target.lanes))
    yield norm_route(target)
    yield Build("rank", moe_route._rank, types, {"BLOCK": moe_route.BLOCK}, 4)
    sizes = {"ROWS": 16, "BLOCK_E": 128, "BLOCK": moe_route.BLOCK}
    yield Build("sort", moe_route._sort, types, {**sizes, **overlap}, 4)
    yield Build("place", moe_route._place, types, sizes, 4)
    yield Build("combine", moe_product.combine_kernel, types, {"TOP_K": 8, "BLOCK": 1024, **overlap}, 4)


def norm_route(target: Target) -> Build:
    """The norm and the router of DeepSeek-V3, the largest ones."""
    types = dict.fromkeys(("x", "stream", "normed", "after", "norm", "router"), "*bf16")
    types |= dict.fromkeys(("weights", "logits", "bias", "correction"), "*fp32")
    types |= dict.fromkeys(("experts", "counters"), "*i32") | dict.fromkeys(("hidden", "pitch"), "i32")
    types |= dict.fromkeys(("eps", "offset", "scale"), "fp32")
    choice = moe_route.choice_of(Routing(8, "sigmoid", True, 2.5, 8, 4, "top2"), 256, True)
    constants = {name.upper(): value for name, value in choice._asdict().items()}
    constants |= {"HAS_BIAS": True, "BLOCK_N": moe_norm_route.EXPERTS, "BLOCK_H": 8192}
    constants |= {"OVERLAP": target.device.target.overlaps}
    kernel = moe_norm_route.norm_route_kernel
    return Build(
        "norm-route",
        kernel,
        types,
        constants,
        moe_norm_route.warps_of(8192, target.lanes),
        3,
        frozenset(("hidden", "pitch")),
    )


def runs() -> Iterator[Any]:
    for target in TARGETS:
        for build in (*products(target), *others(target), *tiles(target), *one_token(target)):
            quick = often(target, build.label) and build.label in (
                "dense-plain-512",
                "router",
                "sort",
                "place",
                "tiles-0",
                "one-token-down",
            )
            yield pytest.param(target, build, id=f"{target}-{build.label}", marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize(("target", "build"), list(runs()))
def test_compiles(target: Target, build: Build, tmp_path: Path) -> None:
    compiled = compile_for(target, build)
    assert compiled.metadata.shared <= target.shared
    if (str(target), build.label) not in SPILLING:
        assert spilled(target, compiled, tmp_path) == 0


def test_the_clamped_gate_keeps_nan() -> None:
    """The interpreter does not show this: numpy's functions keep NaN."""
    target = next(target for target in TARGETS if str(target) == "sm_90")
    build = product(target, "dense", "plain", 2048, 512)
    clamped = replace(build, constants={**build.constants, "GATE": 3})
    code = compile_for(target, clamped).asm["ptx"]
    assert "min.NaN" in code
    assert not re.search(r"(min|max)\.f32", code)
