"""Arguments of the compiled kernels: dtypes, layouts and the values of their enumerations.

The wrappers call the references for tensors of other dtypes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import cpu  # noqa: F401  loads the library
from ..ops.attention import Attend, Rows
from ..ops.state import StateRows

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
GATES = {"silu_and_mul": 0, "gelu_and_mul": 1, "gelu_tanh_and_mul": 2}  # values of the enum Activation in cpu/kernels.h
ROTATIONS = {"neox": 0, "interleaved": 1}  # values of the enum Rotation in cpu/kernels.h


def attention_arguments(rows: Rows, attend: Attend) -> tuple[Any, ...]:
    """The arguments that follow the queries in all ops of attention over pages of keys and values."""
    tables = rows.row_starts, rows.context_lens, rows.page_table
    sinks = None if attend.sinks is None else attend.sinks.float()
    return attend.key_pages, attend.value_pages, *tables, sinks, attend.scale, attend.window, attend.soft_cap


def state_arguments(rows: StateRows) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of rows with states: row_starts, context_lens, slots."""
    return rows.rows.row_starts, rows.rows.context_lens, rows.slots


def heads_dense(x: Tensor) -> Tensor:
    """x [tokens, heads, dim] with the heads of each token contiguous; a copy only if they are not."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def has_dense_heads(x: Tensor) -> bool:
    """True if the heads of each token of x [tokens, heads, dim] are contiguous. Tokens may have any stride."""
    one_head = x.shape[1] == 1
    return x.stride(2) == 1 and (one_head or x.stride(1) == x.shape[2])
