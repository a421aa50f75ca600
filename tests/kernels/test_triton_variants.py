"""Triton compiles a kernel again for another alignment of its arguments, when that first occurs. The kernels must
not depend on the addresses or the lengths of a step's arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from localllm.kernels.triton import (
    attention_decode,
    attention_prefill,
    draw,
    sampling,
    small_batch,
    small_batch_transposed,
    state,
)

LISTS = ("rows", "tokens", "values", "in_prompt", "in_output", "repetition", "presence", "frequency")
DRAWS = ("temperature", "seed_low", "seed_high", "position", "top_k", "top_p")
NOTES = ("keys", "ids", "noisy", "noisy_ids", "maxima", "sums")
ROWS = ("tiles", "row_starts", "context_lens", "page_table")
STATES = ("starts", "contexts", "slots")
MOVED = [
    (sampling._carry, ("tokens", "ends", "carried", "drawn", "rows")),
    (sampling._bias, (*LISTS[:3], "count")),
    (sampling._penalise, (*LISTS[:2], *LISTS[3:], "count")),
    (sampling._mask, ("rows", "words")),
    (sampling._largest, ("keys", "ids")),
    (sampling._larger, ("keys", "ids")),
    (sampling._likeliest, ("k",)),
    (draw._survey, (*DRAWS, *NOTES)),
    (draw._choose, (*DRAWS, "min_p", *NOTES, "listed")),
    (attention_decode.decode, (*ROWS, "count", "chunks", "table_row", "window")),
    (attention_prefill.prefill, (*ROWS, "table_row", "window")),
    (state._convolve, STATES),
    (state._keep, STATES),
    (state._scan, STATES),
    (small_batch.small_batch_kernel, ("rows",)),
    (small_batch_transposed.small_batch_transposed_kernel, ("rows",)),
]
# Their rows are a number, not a list.
COUNTED = (sampling._carry, small_batch.small_batch_kernel, small_batch_transposed.small_batch_transposed_kernel)
NUMBERS = ("rows", "count", "chunks", "k", "table_row", "window")


def variant(kernel: Any, moved: dict[str, Any]) -> Any:
    """The properties of the arguments that the compiled kernel depends on. Arguments that are not in `moved` are
    aligned."""
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    return bind(**{name: moved.get(name, 16) for name in kernel.arg_names})[1]


@pytest.mark.skipif(not hasattr(draw._survey, "params"), reason="interpreted")
@pytest.mark.parametrize(("kernel", "moved"), MOVED, ids=[kernel.__name__ for kernel, _ in MOVED])
def test_one_kernel_is_compiled_for_all_addresses_and_lengths(kernel: Any, moved: tuple[str, ...]) -> None:
    whole = torch.zeros(64, dtype=torch.int32)
    number = [name for name in moved if name in NUMBERS and (name != "rows" or kernel in COUNTED)]
    kinds = [
        variant(kernel, {name: size if name in number else whole[start:] for name in moved})
        for size, start in ((16, 0), (1, 1), (7, 2), (48, 3))
    ]
    assert all(kind == kinds[0] for kind in kinds)
