"""Benchmarks of the LoRA products. The bound is the time to read the factors of all adapters once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from work import Work

from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases.lora import random_adapters, random_weights

ADAPTERS = 4
ROWS = (1, 8, 64)
RANK = 16
VOCAB = 1024  # a larger vocabulary takes more memory and no more time


def works(matrices: Sequence[tuple[int, int]], hidden: int, dtype: torch.dtype) -> Iterator[Work]:
    """A `Work` for each (out_features, in_features) of `matrices` and each number of rows, and for the embedding. The
    rows have up to 4 adapters of rank 16."""
    reference = dict(Ops())
    for rows in ROWS:
        adapters = min(rows, ADAPTERS)
        label = f"{rows} rows, {adapters} adapters"
        for out_features, in_features in matrices:
            yield Work(
                op="lora.add",
                label=f"{label}, {out_features} x {in_features}",
                make=partial(_add, rows, out_features, in_features, dtype),
                bytes=float(adapters * RANK * (out_features + in_features) * dtype.itemsize),
                reference=reference["lora.add"],
                dtype=dtype,
            )
        yield Work(
            op="lora.embedding",
            label=label,
            make=partial(_embedding, rows, hidden, dtype),
            bytes=float(adapters * RANK * hidden * dtype.itemsize),
            reference=reference["lora.embedding"],
            dtype=dtype,
        )


def _add(rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> Mapping[str, Any]:
    return {"x": torch.randn(rows, in_features).to(dtype), **_arguments(rows, out_features, in_features, dtype)}


def _embedding(rows: int, hidden: int, dtype: torch.dtype) -> Mapping[str, Any]:
    tokens = torch.randint(VOCAB, (rows,), dtype=torch.int32)
    return {"tokens": tokens, **_arguments(rows, hidden, VOCAB, dtype)}


def _arguments(rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    ranks = (0, *[RANK] * min(rows, ADAPTERS))
    return {
        "out": torch.randn(rows, out_features).to(dtype),
        "weights": random_weights(ranks, in_features, (out_features,), generator, dtype),
        "adapters": random_adapters([(1, 1 + row % ADAPTERS) for row in range(rows)], generator),
    }
