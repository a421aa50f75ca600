"""Runs every CUDA C++ kernel with random shapes. scripts/sanitize_cuda runs this program under compute-sanitizer.

`python scripts/cuda_shapes.py [--shapes 200] [--first 0] [kernel ...]`; `--list` lists the kernels. The shapes are
small, odd and not aligned, in every dtype that a kernel supports. The tests compare results; this program does not.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from localllm.kernels.ops import Ops
from localllm.kernels.ops.attention import Attend, Rows
from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.layer import Layer
from localllm.kernels.ops.linear import Fp8, Int4, Int8, Linear, Weight

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ON_GPU: Mapping[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
FORMATS = ("dense", "int8", "int4", "int4_wide", "fp8")
HALVES = (torch.bfloat16, torch.float16)
# (max out_features, max in_features / 8) of products with one row: many tiles per block, and full ring buffers.
ONE_ROW_SIZES = ((20000, 100), (4000, 400), (600, 1900))

Draw = Callable[[random.Random], object]  # computes one random shape


def floats(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def rows_apart(pick: random.Random, *shape: int, dtype: torch.dtype) -> Tensor:
    """Random numbers with a random offset, and random gaps between the rows."""
    gap = pick.choice([0, 0, 1, 8, 24])
    first = pick.choice([0, 0, 1, 3, 8])
    width = 1
    for size in shape[1:]:
        width *= size
    storage = floats(shape[0], first + width + gap, dtype=dtype)
    return storage[:, first : first + width].unflatten(1, shape[1:])


def width(pick: random.Random, maximum: int = 3000) -> int:
    return pick.choice([pick.randint(1, maximum), 8 * pick.randint(1, maximum // 8)])


def rms_norm(pick: random.Random) -> None:
    dim = width(pick, 9000)
    dtype = pick.choice(FLOATS)
    heads = pick.randint(1, 9), pick.randint(1, 8), dim % 300 + 1
    shape = heads if pick.random() < 0.4 else (pick.randint(1, 40), dim)
    x = rows_apart(pick, *shape, dtype=dtype)
    weight = floats(shape[-1], dtype=pick.choice([dtype, torch.float32]))
    torch.ops.localllm.rms_norm(x.new_empty(shape), x, weight, 1e-6, pick.choice([0.0, 1.0]))


def add_rms_norm(pick: random.Random) -> None:
    rows = pick.randint(1, 40)
    dim = width(pick, 9000)
    dtype = pick.choice(FLOATS)
    x = rows_apart(pick, rows, dim, dtype=dtype)
    residual = floats(rows, dim, dtype=dtype)
    torch.ops.localllm.add_rms_norm(x.new_empty(rows, dim), x, residual, floats(dim, dtype=dtype), 1e-6, 0.0)


def gate(pick: random.Random) -> None:
    rows = pick.randint(1, 40)
    dim = width(pick)
    x = rows_apart(pick, rows, 2 * dim, dtype=pick.choice(FLOATS))
    torch.ops.localllm.gate(x.new_empty(rows, dim), x, pick.randint(0, 2))


def angles(pick: random.Random, tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(tokens, pick.choice([dim // 2, dim // 4, pick.randint(0, dim // 2)]), device="cuda")
    return angle.cos(), angle.sin()


def head_dim(pick: random.Random) -> int:
    return pick.choice([32, 64, 80, 96, 128, 192, 256, pick.randint(1, 300)])


def rope(pick: random.Random) -> None:
    tokens = pick.randint(1, 40)
    heads = pick.randint(1, 9)
    dim = head_dim(pick)
    x = rows_apart(pick, tokens, heads, dim, dtype=pick.choice(FLOATS))
    torch.ops.localllm.rope(x, *angles(pick, tokens, dim), pick.randint(0, 1))


def slots(pick: random.Random, tokens: int, count: int) -> Tensor:
    """Distinct slots of a cache with `count` slots. Some are out of range: kernels ignore these."""
    slots = pick.sample(range(count), tokens)
    for index in range(tokens):
        if pick.random() < 0.1:
            slots[index] = pick.choice([-1, count])
    return torch.tensor(slots, device="cuda")


def store(pick: random.Random) -> None:
    tokens = pick.randint(1, 40)
    heads = pick.randint(1, 4)
    dim = head_dim(pick)
    dtype = pick.choice(FLOATS)
    key, value = (rows_apart(pick, tokens, heads, dim, dtype=dtype) for _ in range(2))
    pages = floats(2, 12, 4, heads, dim).to(pick.choice([*FLOATS, torch.float8_e4m3fn]))
    torch.ops.localllm.store(key, value, pages[0], pages[1], slots(pick, tokens, 48))


def append(pick: random.Random) -> None:
    tokens = pick.randint(1, 40)
    heads = pick.randint(1, 9)
    kv_heads = pick.randint(1, 4)
    dim = head_dim(pick)
    dtype = pick.choice(FLOATS)
    norms = floats(2, dim, dtype=pick.choice([dtype, torch.float32]))
    head_norms = (norms[0], norms[1]) if pick.random() < 0.7 else (None, None)
    qkv = rows_apart(pick, tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    pages = floats(2, 12, 4, kv_heads, dim).to(pick.choice([dtype, torch.float8_e4m3fn]))
    tables = angles(pick, tokens, dim)
    rotation = pick.randint(0, 1)
    positions = slots(pick, tokens, 48)
    torch.ops.localllm.append(qkv, *head_norms, 1e-6, 0.0, *tables, rotation, positions, pages[0], pages[1])


def copy_cache_pages(pick: random.Random) -> None:
    """Copies pages within each of several caches. Some page numbers are out of range: kernels ignore these."""
    count = pick.randint(2, 40)
    copies = pick.randint(1, 20)
    dtype = pick.choice([*FLOATS, torch.float8_e4m3fn])
    pages = floats(pick.randint(1, 6), count, pick.randint(1, 16), pick.randint(1, 300)).to(dtype)
    sources = torch.randint(-1, count + 1, (min(copies, count),), device="cuda")
    targets = torch.randperm(count + 2, device="cuda")[: len(sources)] - 1
    torch.ops.localllm.copy_cache_pages(pages, sources, targets)


def embedding(pick: random.Random) -> None:
    rows = pick.randint(1, 300)
    words = pick.randint(1, 500)
    dim = width(pick)
    dtype = pick.choice(FLOATS)
    tokens = torch.randint(-1, words + 1, (rows,), device="cuda", dtype=torch.int32)
    out = torch.empty(rows, dim, device="cuda", dtype=dtype)
    torch.ops.localllm.embedding(out, tokens, floats(words, dim, dtype=pick.choice([dtype, torch.bfloat16])), 2.0)


def weight(pick: random.Random, op: str, out_features: int, in_features: int) -> Weight:
    def below(top: int, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(top, shape, device="cuda", dtype=torch.int32).to(dtype)

    group = pick.choice([32, 64, 128, 256] if op.startswith("int4") else [64, 128, in_features])
    if op == "fp8_rounded":
        group = in_features
    scale = torch.rand(out_features, -(-in_features // group), device="cuda") / in_features
    match op:
        case "int8":
            return Int8(below(255, out_features, in_features, dtype=torch.int8), scale[:, 0].contiguous())
        case "fp8" | "fp8_rounded":
            return Fp8(floats(out_features, in_features).to(torch.float8_e4m3fn), scale, group)
        case "int4" | "int4_wide":
            data = below(256, out_features, -(-in_features // 2), dtype=torch.uint8)
            return Int4(data, scale.half(), below(17, *scale.shape, dtype=torch.uint8), group, in_features)
    return floats(out_features, in_features)


def product(op: str, pick: random.Random, max_rows: int = 16) -> None:
    """A product of 1 to `max_rows` rows, sometimes with a norm of its input or a gate of its output, as in a layer."""
    from localllm.kernels.cuda.products.linear import INT4_WIDE, can_fuse_norm, pack_slices, small_batch

    widest, longest = (400, 150) if max_rows > 1 else pick.choice(ONE_ROW_SIZES)
    rows = pick.randint(1, max_rows)
    out_features = pick.randint(1, widest)
    in_features = 8 * pick.randint(1, longest)
    gate = pick.choice([-1, -1, 0, 1, 2])
    if gate >= 0:
        out_features = 16 * (out_features // 16 + 1)
    packed = pack_slices([weight(pick, op, out_features, in_features)], out_features, torch.bfloat16)
    bias = floats(out_features, dtype=pick.choice(FLOATS)) if pick.random() < 0.3 else None
    norm = stream = None
    if pick.random() < 0.5 and can_fuse_norm(op, packed, rows):
        norm = (floats(in_features), 1e-6, 0.0)
        stream = floats(rows, in_features) if pick.random() < 0.7 else None
    format = INT4_WIDE if op == "int4_wide" else None
    dtype = pick.choice([torch.bfloat16, torch.float32])
    small_batch(
        floats(rows, in_features), packed, bias, torch.bfloat16 if gate >= 0 else dtype, format, norm, stream, gate
    )


def tiled_product(op: str, pick: random.Random) -> None:
    """A product of up to 300 rows, also of few rows, with rows that are not adjacent."""
    from localllm.kernels.cuda.products.linear import FP8_ROUNDED, INT4_WIDE, pack_slices, tiled

    rows = pick.choice([pick.randint(1, 40), pick.randint(17, 300)])
    out_features = pick.randint(1, 400)
    in_features = 8 * pick.randint(1, 150)
    packed = pack_slices([weight(pick, op, out_features, in_features)], out_features, torch.bfloat16)
    bias = floats(out_features, dtype=pick.choice(FLOATS)) if pick.random() < 0.3 else None
    format = {"int4_wide": INT4_WIDE, "fp8_rounded": FP8_ROUNDED}.get(op, packed.format)
    rest = packed, bias, pick.choice(FLOATS), format
    x = floats(rows, in_features + pick.choice([0, 8, 64]))[:, :in_features]
    tiled(x, *rest)


def widened_outputs(op: str, pick: random.Random) -> None:
    """Dequantises some outputs of a weight."""
    from localllm.kernels.cuda.products.linear import pack_slices, widen

    out_features = pick.randint(1, 200)
    in_features = 8 * pick.choice([pick.randint(1, 150), pick.randint(1, 2000)])
    packed = pack_slices([weight(pick, op, out_features, in_features)], out_features, torch.bfloat16)
    first = 8 * pick.randrange(-(-out_features // 8))
    widen(packed, first, torch.empty(pick.randint(1, out_features - first), in_features, **ON_GPU))


def round_groups(pick: random.Random) -> None:
    in_features = 8 * pick.choice([pick.randint(1, 400), pick.randint(1, 4000)])
    x = floats(pick.randint(1, 60), in_features + pick.choice([0, 8, 64]))[:, :in_features]
    out = torch.empty(x.shape, **ON_GPU)
    torch.ops.localllm.round_groups(out, x, pick.choice([32, 64, 96, 128, 256, in_features]))


def batch(
    pick: random.Random,
    queries: list[int],
    sharing: list[int],
    sizes: Sequence[int] = (1, 16, 64, 128),
    dims: Sequence[int] = (64, 80, 96, 128, 192, 256),
) -> Mapping[str, Any]:
    """Arguments of attention: `queries` new tokens per row, with contexts of random length before them."""
    size = pick.choice(sizes)
    kv_heads = pick.choice([1, 2, 3, 8])
    dim = pick.choice(dims)
    heads = pick.choice(sharing) * kv_heads
    dtype = pick.choice(HALVES)
    longest = pick.choice([20, 300, 1500])
    contexts = [count + pick.randrange(longest) for count in queries]
    needed = [-(-context // size) for context in contexts]
    order = (torch.randperm(sum(needed)) + 1).to(torch.int32).split(needed)
    table = torch.zeros(len(queries), max(needed) + 3, dtype=torch.int32)
    for row, pages_of_row in enumerate(order):
        table[row, : len(pages_of_row)] = pages_of_row
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    lens = torch.tensor(contexts, dtype=torch.int32)
    pages = floats(2, sum(needed) + 1, size, kv_heads, dim, dtype=dtype)
    return {
        "query": rows_of_heads(sum(queries), heads, dim, dtype),
        "rows": Rows(starts.cuda(), lens.cuda(), table.cuda(), tuple(queries), tuple(contexts)),
        "attend": Attend(
            *(pages[0], pages[1], dim**-0.5),
            sinks=torch.randn(heads, device="cuda") if pick.random() < 0.3 else None,
            window=pick.choice([0, 0, 0, 1, 7, 63, 64, 65, 200]),
            soft_cap=pick.choice([0.0, 0.0, 2.0]),
        ),
    }


def rows_of_heads(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Queries in the memory layout of a product that also computes keys and values."""
    return floats(tokens, heads + 2, dim, dtype=dtype)[:, :heads]


def decode_attention(pick: random.Random) -> object:
    from localllm.kernels.cuda.attention.paged import paged_attention

    arguments = batch(pick, [1] * pick.choice([1, 1, 2, 7, 40]), [1, 2, 3, 4, 5, 8])
    return paged_attention(**(with_fp8_cache(arguments) if pick.random() < 0.3 else arguments))


def with_fp8_cache(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    keys, values = (pages.to(torch.float8_e4m3fn) for pages in arguments["attend"][:2])
    return {**arguments, "attend": arguments["attend"]._replace(key_pages=keys, value_pages=values)}


def prefill_attention(pick: random.Random) -> None:
    """Prefill attention. Needs a Hopper GPU and supports only these page sizes."""
    from localllm.kernels.cuda.attention.prefill import prefill

    queries = [pick.choice([1, 2, 17, 33, 128, 300]) for _ in range(pick.choice([1, 2, 7]))]
    arguments = batch(pick, queries, [1, 2, 3, 4, 5, 8, 16], [8, 16, 64, 128, 256], [64, 128])
    prefill(arguments["query"].new_empty(arguments["query"].shape), **arguments, min_queries=pick.choice([1, 2, 3]))


def prefill_attention_mma(pick: random.Random) -> None:
    """Prefill attention with mma.sync."""
    from localllm.kernels.cuda.attention.prefill_mma import prefill

    queries = [pick.choice([1, 2, 17, 33, 128, 300]) for _ in range(pick.choice([1, 2, 7]))]
    arguments = batch(pick, queries, [1, 2, 3, 4, 5, 8, 16], [1, 8, 16, 64, 128, 256])
    if pick.random() < 0.4:
        arguments = with_fp8_cache(arguments)
    prefill(arguments["query"].new_empty(arguments["query"].shape), **arguments, min_queries=pick.choice([1, 2, 3]))


def decoder_step(pick: random.Random) -> object:
    """All layers of a one-row step. Needs a Hopper GPU. Includes sizes that the engine computes layer by layer."""
    from localllm.kernels.cuda.products.linear import pack_slices
    from localllm.kernels.cuda.step.stack import decoders, prepare_stack
    from localllm.kernels.ops.cases.layer import inputs
    from localllm.kernels.ops.cases.reference_check import device_arguments

    kv_heads = pick.choice([1, 2, 3])
    make = inputs(
        [(1, pick.randint(1, 300))],
        layers=pick.randint(1, 3),
        heads=pick.choice([1, 2, 4, 8]) * kv_heads,
        kv_heads=kv_heads,
        dim=pick.choice([64, 128]),
        hidden=128 * pick.randint(1, 4),
        inner=64 * pick.randint(1, 8),
        bias=pick.random() < 0.3,
        head_norms=pick.random() < 0.5,
        page_size=pick.choice([1, 16, 64, 128]),
    )
    case = Case("layer.decoders", "random", make, packs=("stack",))
    ops = Ops(layer=Layer(decoders=decoders, prepare_stack=prepare_stack), linear=Linear(pack_slices=pack_slices))
    arguments = make(torch.Generator().manual_seed(pick.randrange(10**6)), torch.bfloat16)
    return decoders(**device_arguments(case, ops, arguments, "cuda", torch.bfloat16))


def lora(pick: random.Random, project: bool) -> object:
    """LoRA products, alone or with the product of the base model."""
    from localllm.kernels.cuda.lora import products as lora
    from localllm.kernels.cuda.products.linear import dense, pack_slices
    from localllm.kernels.ops.cases.lora import random_adapters, random_weights
    from localllm.kernels.ops.cases.reference_check import copy_to
    from localllm.kernels.ops.projection import Product

    dtype = torch.bfloat16 if project else pick.choice(FLOATS)
    in_features = pick.choice([pick.randint(1, 300), 8 * pick.randint(1, 400)])
    multiple = pick.choice([1, 4, 64])
    widths = tuple(multiple * pick.randint(1, 1 + 700 // multiple) for _ in range(pick.randint(1, 3)))
    ranks = (0, *(pick.choice([0, 1, 8, 16, 64, 80]) for _ in range(pick.randint(1, 5))))
    if project:
        in_features = 8 * pick.randint(1, 400)
        ranks = (0, 16, 8, 16)
    generator = torch.Generator().manual_seed(pick.randrange(10**6))
    rows = [(pick.choice([1, 1, 5]), pick.randrange(len(ranks))) for _ in range(pick.randint(1, 5 if project else 40))]
    adapters = copy_to(random_adapters([(1, 1), *rows], generator), "cuda")
    weights = copy_to(random_weights(ranks, in_features, widths, generator, dtype), "cuda")
    tokens = len(adapters.slots)
    x = rows_apart(pick, tokens, in_features, dtype=dtype)
    if not project:
        out = rows_apart(pick, tokens, sum(widths), dtype=pick.choice([dtype, torch.float32]))
        torch.cuda.synchronize()  # the kernels read factors before they wait
        return lora.add(out, x, weights, adapters)
    weight = pack_slices([floats(sum(widths), in_features)], sum(widths), dtype)
    bias = floats(sum(widths), dtype=pick.choice(FLOATS)) if pick.random() < 0.3 else None
    ops = Ops(linear=Linear(dense=dense))
    torch.cuda.synchronize()
    out_dtype = pick.choice([torch.bfloat16, torch.float32])
    return lora.project(Product("dense", weight, bias), x, ops, weights, adapters, out_dtype)


def beyond(pick: random.Random) -> object:
    """Decode attention that reads a missing page: a deliberate error that memcheck must report."""
    from localllm.kernels.cuda.attention.paged import paged_attention

    arguments = batch(pick, [1], [1])
    arguments["rows"].page_table.fill_(10**6)
    return paged_attention(**arguments)


def choice_products(op: str, pick: random.Random) -> None:
    """The products of the choices of few tokens in a mixture of experts."""
    from localllm.kernels.cuda.moe import experts as moe
    from localllm.kernels.ops.cases.moe import random_weight
    from localllm.kernels.ops.moe import Routed

    rows, per_row, count = pick.randint(1, 5), pick.randint(1, 8), pick.randint(1, 6)
    outputs, in_features = 8 * pick.randint(1, 40), 8 * pick.randint(1, 500)
    if op == "mxfp4":
        in_features += -in_features % 32
    group = pick.choice([64, 128, 256] if op == "fp8" else [32, 64, 128])
    gate = pick.choice([-1, 0, 1, 2, 3])
    full = outputs * (1 if gate < 0 else 2)
    weight = random_weight(op, count * full, in_features, torch.Generator(), torch.bfloat16, group)
    packed = moe.pack_slices([type(weight)(*map(moved, weight))], count, full, torch.bfloat16)
    experts = torch.randint(0, count, (rows, per_row), dtype=torch.int32, device="cuda")
    bias = floats(count, full, dtype=torch.float32) if pick.random() < 0.5 else None
    x = floats(rows, in_features)
    out = x.new_empty(rows * per_row, outputs, dtype=pick.choice([torch.float32, torch.bfloat16]))
    moe.choice_products(out, x, Routed(experts, floats(0)), op, packed, bias, gate)


def moved(value: Any) -> Any:
    return value.cuda() if isinstance(value, Tensor) else value


KERNELS: Mapping[str, Draw] = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "gate": gate,
    "rope": rope,
    "store": store,
    "append": append,
    "copy_cache_pages": copy_cache_pages,
    "embedding": embedding,
    **{f"small_batch_{op}": partial(product, op) for op in ("dense", "int8", "int4", "int4_wide", "fp8")},
    **{
        f"small_batch_{op}_alone": partial(product, op, max_rows=1)
        for op in ("dense", "int8", "int4", "int4_wide", "fp8")
    },
    "lora_shrink": partial(lora, project=False),
    "lora_expand": partial(lora, project=False),
    **{f"tiled_product_{op}": partial(tiled_product, op) for op in ("int8", "int4", "int4_wide", "fp8", "fp8_rounded")},
    "small_batch_lora": partial(lora, project=True),
    **{f"widen_{op}": partial(widened_outputs, op) for op in ("int4", "fp8")},
    "round_groups": round_groups,
    **{f"choice_products_{op}": partial(choice_products, op) for op in ("int8", "int4", "int4_wide", "fp8", "mxfp4")},
    "decode_attention": decode_attention,
    "prefill_attention": prefill_attention,
    "prefill_attention_mma": prefill_attention_mma,
    "decoder_step": decoder_step,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=200, help="number of shapes of each kernel")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first shape, so that several processes can share the shapes"
    )
    parser.add_argument("--list", action="store_true")
    parser.add_argument("kernels", nargs="*", choices=[*KERNELS, "beyond", []], help="kernels to run; default: all")
    options = parser.parse_args()
    if options.list:
        return print(*KERNELS, sep="\n")
    importlib.import_module("localllm.kernels.cuda")
    total = Counter[str]()
    for name in options.kernels or KERNELS:
        start = time.perf_counter()
        draw = KERNELS.get(name, beyond)
        calls = Counter[str]()
        for seed in range(options.first, options.first + options.shapes):
            torch.manual_seed(seed)
            with Calls(calls):
                draw(random.Random(f"{name} {seed}"))
            torch.cuda.synchronize()
        if name in KERNELS and not any(name.startswith(op) for op in calls):
            sys.exit(f"{name}: none of {options.shapes} shapes reached the kernel")
        total += calls
        print(f"{name}: {options.shapes} shapes, {time.perf_counter() - start:.1f} s", flush=True)
    print("calls:", ", ".join(f"{op} {count}" for op, count in sorted(total.items())))


class Calls(TorchDispatchMode):
    """Counts the calls of the ops of localllm."""

    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "localllm":
            self._calls[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    main()
