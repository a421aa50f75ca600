"""Every CPU kernel beside its bound and torch: runs all *_works.py and saves the results.

`python scripts/bench/kernels.py [--shape llama-8b] [--families linear,attention] [--formats int8] [--rows 1,512]
[--threads 1,2]`.
`ours` and `peer` (torch) are microseconds; `bound_share` is the share of the bound, and `bound` the rate that sets it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping

import attention_works as attention
import elements_works as elements
import linear_works as linear
import lora_works as lora
import moe_works as moe
import sampling_works as sampling
import torch
from cpu_peaks import CpuPeaks
from rows import Row, parser, row, save
from shapes import SHAPES, Shape
from work import Work, timed

from localllm.backends.cpu.device import OPS
from localllm.backends.machine import BF16_FLAGS, cores, cpu_flags

FAMILIES = ("linear", "moe", "attention", "latent", "elements", "lora", "sampling")
LATENT = 16, 64, 512  # heads, rotary and rank of DeepSeek-V2-Lite
EXPERTS: Mapping[str, moe.Model] = {
    "1b-a0.2b": moe.Model(experts=32, top_k=4, hidden=1024, inner=512),
    "30b-a3b": moe.Model(experts=128, top_k=8, hidden=2048, inner=768),
}
UNITS: Mapping[str, tuple[float, str]] = {"read": (1e9, "GB/s")}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    arguments.add_argument("--families", default=",".join(FAMILIES))
    arguments.add_argument("--formats", default="bf16,int8,int4,int4_wide,fp8,mxfp4")
    arguments.add_argument("--rows", default="1,16,128,512")
    arguments.add_argument("--experts", choices=EXPERTS, default="1b-a0.2b", help="sizes of a mixture of experts")
    arguments.add_argument("--threads", default=str(cores()), help="numbers of threads, such as 1,2")
    arguments.add_argument("--save", default="kernels")
    save(arguments.parse_args().save, measure(arguments.parse_args()))


@torch.inference_mode()
def measure(options: argparse.Namespace) -> Iterator[Row]:
    shape = SHAPES[options.shape]
    dtype = torch.bfloat16 if cpu_flags() & BF16_FLAGS else torch.float32
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        torch.ops.localllm.use_threads(threads)
        rates = CpuPeaks()
        peaks = rates.all()
        for name, peak in peaks.items():
            unit, word = UNITS.get(name, (1e9, "GOP/s"))
            yield row(f"ceiling, {name}", peak / unit, word, threads=threads, lane=_variant())
        for work in _works(shape, options, dtype):
            result = timed(work, OPS, peaks, rates.read)
            yield row(
                f"{result.op}, {result.label}",
                result.seconds * 1e6,
                "µs",
                peer=round(result.torch_seconds * 1e6, 2),
                ratio=result.torch_seconds / result.seconds,
                bound_share=result.share,
                bound=result.bound,
                dtype=str(dtype).removeprefix("torch."),
                threads=threads,
                lane=_variant(),
            )


def _works(shape: Shape, options: argparse.Namespace, dtype: torch.dtype) -> Iterator[Work]:
    families = options.families.split(",")
    heads = shape.heads, shape.kv_heads, shape.head_dim
    if "linear" in families:
        formats = options.formats.split(",")
        queries = shape.heads * shape.head_dim
        keys = shape.kv_heads * shape.head_dim
        matrices = [
            (shape.hidden, queries + 2 * keys),
            (queries, shape.hidden),
            (shape.hidden, 2 * shape.inner),
            (shape.inner, shape.hidden),
        ]
        yield from linear.works(formats, [int(rows) for rows in options.rows.split(",")], matrices, dtype)
        yield from linear.works(formats, [1], [(shape.hidden, shape.vocab)], dtype)
    if "moe" in families:
        rows = [int(rows) for rows in options.rows.split(",")]
        yield from moe.works(options.formats.split(","), rows, EXPERTS[options.experts], dtype)
    if "attention" in families:
        yield from attention.works(*heads, dtype)
    if "latent" in families:
        yield from attention.latent_works(*LATENT, dtype)
    if "elements" in families:
        yield from elements.works(elements.Model(shape.hidden, shape.inner, *heads, shape.vocab, dtype))
    if "lora" in families:
        matrices = [(shape.hidden, shape.heads * shape.head_dim), (shape.inner, shape.hidden)]
        yield from lora.works(matrices, shape.hidden, dtype)
    if "sampling" in families:
        yield from sampling.works(shape.vocab)


def _variant() -> str:
    """The ISA variant in use, as chosen when the library was loaded."""
    variant: str = torch.ops.localllm.use_variant(os.environ.get("LOCALLLM_CPU_LANE", ""))
    return variant


if __name__ == "__main__":
    main()
