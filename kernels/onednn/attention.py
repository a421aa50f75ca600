"""Attention without Triton: the pages of each row are gathered, then oneDNN computes torch's attention."""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..ops import attention as reference
from ..ops.attention import Attend, RowGroup, Rows

STEP = 128  # positions: oneDNN compiles attention once for each length


class RoundedRows(Rows):
    """Rows with contexts rounded up to multiples of STEP. The added positions are masked."""

    def groups(self, page_size: int, window: int) -> list[RowGroup]:
        key = page_size, window
        if key not in self.plans:
            self.plans[key] = list(self._groups(page_size, window))
        groups: list[RowGroup] = self.plans[key]
        return groups


def paged_attention(query: Tensor, rows: Rows, attend: Attend, out: Tensor | None = None) -> Tensor:
    """See attention.paged_attention."""
    if rows.exact:
        return reference.paged_attention(query, _rounded(rows), attend, out)
    with sdpa_kernel(SDPBackend.MATH):  # torch 2.13 cannot capture oneDNN's attention in a graph
        return reference.paged_attention(query, rows, attend, out)


def _rounded(rows: Rows) -> RoundedRows:
    """The rounded rows, the same for all layers."""
    rounded: RoundedRows | None = rows.plans.get(STEP)
    if rounded is None:
        contexts = tuple(-(-context // STEP) * STEP for context in rows.contexts)
        starts, lens, table = rows.row_starts, rows.context_lens, rows.page_table
        rounded = rows.plans[STEP] = RoundedRows(starts, lens, table, rows.query_lens, contexts, exact=False)
    return rounded
