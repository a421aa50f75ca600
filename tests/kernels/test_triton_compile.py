"""Every Triton kernel, in the shapes of its launches, compiled for every target without a device. Its shared memory
fits the target, and no registers are spilled."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from localllm.kernels.triton import attention
from localllm.kernels.triton.attention_decode import decode
from localllm.kernels.triton.attention_prefill import prefill
from localllm.kernels.triton.target import Device, target_of

pytestmark = [
    pytest.mark.compile,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile"),
]

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e4m3fnuz: "*fp8e4b8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}


@dataclass(frozen=True, slots=True)
class Target:
    backend: str
    arch: int | str
    lanes: int  # of a warp
    shared: int  # bytes of shared memory a program may take

    @property
    def device(self) -> Device:
        """The device as the wrappers see it."""
        return Device(132, self.shared, target_of(self.backend, self.arch))

    def __str__(self) -> str:
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)


TARGETS = [
    Target("cuda", 80, 32, 163 << 10),
    Target("cuda", 90, 32, 227 << 10),
    Target("cuda", 100, 32, 227 << 10),
    Target("cuda", 120, 32, 99 << 10),
    Target("hip", "gfx90a", 64, 64 << 10),
    Target("hip", "gfx942", 64, 64 << 10),
    Target("hip", "gfx950", 64, 160 << 10),
    *(Target("hip", f"gfx{number}", 32, 64 << 10) for number in (1100, 1101, 1151, 1200, 1201)),
]


@dataclass(frozen=True, slots=True)
class Build:
    """A kernel and everything that its binary depends on. Pointers and `even` numbers are aligned."""

    label: str
    kernel: Any
    arguments: Mapping[str, str]  # types of the arguments that are not constant
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    even: frozenset[str] = field(default_factory=frozenset)
    shared: int = 1 << 30  # bytes of shared memory that its wrapper expects


def attention_builds(target: Target) -> Iterator[Build]:
    """Decode and prompts in the shapes of Llama 3.1 8B and Qwen3 0.6B, all options at once, odd heads, and fp8."""
    device = target.device
    plain = {"WINDOW": False, "CAP": False, "SINKS": False}
    every = {"WINDOW": True, "CAP": True, "SINKS": True}
    bf16, fp16, fp32, fp8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
    yield _attend(device, "llama", bf16, bf16, 4, 1, 128, plain)
    yield _attend(device, "qwen", bf16, bf16, 2, 1, 128, plain)
    yield _attend(device, "fp8-256", bf16, fp8, 8, 1, 256, every)
    if device.target.fp8 == torch.float8_e4m3fnuz:
        yield _attend(device, "fnuz-256", bf16, torch.float8_e4m3fnuz, 8, 1, 256, every)
    yield _attend(device, "fp32-80", fp32, fp32, 1, 4, 80, every)
    yield _attend(device, "many", bf16, bf16, 4, 0, 128, plain)
    yield _attend(device, "llama", bf16, bf16, 4, 0, 128, plain, prefill)
    yield _attend(device, "fp16-64", fp16, fp16, 4, 0, 64, every, prefill)
    yield _attend(device, "256", bf16, bf16, 2, 0, 256, every, prefill)
    if device.target.in_registers:  # the largest tiles of short rows, and the widest heads
        yield _attend(device, "four-queries", bf16, bf16, 8, 4, 128, every)
        yield _attend(device, "alone-256", bf16, bf16, 1, 0, 256, plain, prefill)
    if attention.tiling(16, 512, bf16, device, 64) is None:
        assert str(target).startswith("gfx11"), "the reference computes latent attention"
        return
    yield _attend(device, "latent", bf16, bf16, 16, 1, 512, plain, extra=64)
    yield _attend(device, "latent-several", bf16, bf16, 16, 4, 512, plain, extra=64)
    yield _attend(device, "latent", bf16, bf16, 16, 0, 512, plain, prefill, extra=64)
    if str(target) == "sm_120":  # the least memory of NVIDIA's
        yield _attend(device, "512", bf16, bf16, 16, 4, 512, plain)
        yield _attend(device, "512", bf16, bf16, 8, 0, 512, plain, prefill)


def _attend(
    device: Device,
    label: str,
    dtype: torch.dtype,
    cache: torch.dtype,
    group: int,
    queries: int,  # of a tile; 0: as many as a tile of a long row has
    dim: int,
    options: Mapping[str, bool],
    kernel: Any = decode,
    extra: int = 0,  # columns of latent keys that are no values
) -> Build:
    tiling = attention.tiling(group, dim, dtype, device, extra)
    assert tiling is not None
    count = min(queries, tiling[1]) or max(1, tiling[0] // group)
    blocks = attention.shape(count * group, count, dim, dtype, device, extra)
    fp8 = "" if cache == dtype else "native" if cache == device.target.fp8 else "bits"
    held = torch.uint8 if fp8 == "bits" else cache
    pointers = {"out": dtype, "query": dtype, "keys": held, "values": held, "sinks": torch.float32}
    pointers |= dict.fromkeys(("tiles", "row_starts", "context_lens", "page_table", "counters"), torch.int32)
    pointers |= dict.fromkeys(("partial", "stats"), torch.float32)
    strides = "query_token query_head key_page key_slot key_head value_page value_slot value_head out_token".split()
    arguments = {name: POINTERS[kind] for name, kind in pointers.items()}
    arguments |= dict.fromkeys((*strides, "table_row", "count", "chunks", "window"), "i32")
    arguments |= {"scale": "fp32", "soft_cap": "fp32"}
    constants = {
        "GROUP": group, "QUERIES": count, "DIM": dim, "PAGE_SIZE": 16, "BLOCK_M": blocks.m, "BLOCK_N": blocks.n,
        "BLOCK_D": blocks.d, "EXTRA": extra, "BLOCK_E": blocks.e,
        **attention.merging(count * group, count, blocks.d, device), "ALONE": False, "LISTED": not queries, "FP8": fp8,
        **options,
    }  # fmt: skip
    expected = blocks.shared(dtype, device)
    return Build(label, kernel, arguments, constants, blocks.warps, blocks.stages, frozenset(strides), expected)


# Known: 16 to 32 bytes of a thread beside the loop, with Triton 3.7.
SPILLING = {
    *(("sm_80", "prefill", label) for label in ("llama", "fp16-64")),
    *((target, "decode", "many") for target in ("sm_90", "sm_100")),
    *(("sm_120", "decode", label) for label in ("llama", "fp32-80", "512")),
    ("sm_120", "prefill", "512"),
}
KERNELS: tuple[Callable[[Target], Iterator[Build]], ...] = (attention_builds,)
AMD = ("llama", "add-rms", "neox", "vocab", "round-rows", "tiled-by_half-64-bf16", "dense-plain-512", "sort")


def often(target: Target, label: str) -> bool:
    """Whether `make test` compiles it: all for an H100, some of each file for AMD GPUs with 64 and 32 lanes."""
    return str(target) == "sm_90" or (str(target) in ("gfx942", "gfx1100") and label in AMD)


def parameters(runs: Iterable[tuple[Target, Build]]) -> Iterator[Any]:
    for target, build in runs:
        marks = [] if often(target, build.label) else [pytest.mark.slow]
        yield pytest.param(target, build, id=f"{target}-{build.kernel.__name__}-{build.label}", marks=marks)


RUNS = [(target, build) for target in TARGETS for make in KERNELS for build in make(target)]


@pytest.mark.parametrize(("target", "build"), parameters(RUNS))
def test_compiles(target: Target, build: Build, tmp_path: Path) -> None:
    compiled = compile_for(target, build)
    assert compiled.metadata.shared <= (min(target.shared, build.shared) if target.backend == "cuda" else target.shared)
    if (str(target), build.kernel.__name__, build.label) not in SPILLING:
        assert spilled(target, compiled, tmp_path) == 0


def compile_for(target: Target, build: Build) -> Any:
    names = build.kernel.arg_names
    signature = {name: "constexpr" if name in build.constants else build.arguments[name] for name in names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name in build.even or signature[name].startswith("*")
    }
    source = ASTSource(
        build.kernel, signature, {name: value for name, value in build.constants.items() if name in names}, attributes
    )
    options = {"num_warps": build.warps, "num_stages": build.stages}
    return triton.compile(source, GPUTarget(target.backend, target.arch, target.lanes), options)


def spilled(target: Target, compiled: Any, folder: Path) -> int:
    """The bytes of memory per thread for registers, as the compiled file reports them."""
    if target.backend == "hip":
        return int(re.findall(r"\.private_segment_fixed_size:\s*(\d+)", compiled.asm["amdgcn"])[0])
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    report = subprocess.run([tool, "--dump-resource-usage", binary], check=True, capture_output=True, text=True).stdout
    return sum(int(size) for size in itertools.chain(*re.findall(r"STACK:(\d+).*LOCAL:(\d+)", report)))
