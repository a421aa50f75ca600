"""What a step computes: the calls of the model that it is made of, and the step that goes on with the last one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...engine.batch import Batch, Want
from .caches import Group
from .holders import Resident


@dataclass(frozen=True, slots=True)
class Work:
    """One call of the model: batch rows in the order of the groups' rows."""

    rows: list[int]
    groups: list[Group]
    new: list[int]  # tokens of each group's rows
    filled: int = 1  # so many are computed of each row
    passing: bool = False  # its row finds no room among the groups: to be computed before the next call is asked for


class Steady:
    """The last step, whose rows all decoded: nearly every step does no more than go on with it."""

    def __init__(self, work: Work, residents: list[Resident], batch: Batch, page_size: int) -> None:
        """`residents`: of the batch's rows."""
        self.work, self.residents = work, residents
        self.answers: NDArray[np.intp] = np.arange(batch.num_rows)
        self._positions, self._table = batch.positions, batch.page_tables[0]
        # [rows, pages]: those that the residents hold
        self._used = np.arange(batch.page_tables[0].shape[1]) <= (batch.positions // page_size)[:, None]
        self._in_order = work.rows == self.answers.tolist()
        self._wants: NDArray[np.uint8] | None = None  # of the batch looked at last; the engine hands the same on, too
        self._draws = False  # so does each row of it

    def goes_on(self, batch: Batch) -> bool:
        """Each row of `batch` has one more token, and all else is as it was: it is the last step from now on."""
        table = batch.page_tables[0]  # the engine hands the same array on where no page is new
        if (
            len(batch.page_copies[0])
            or batch.num_tokens != batch.num_rows
            or not np.array_equal(batch.positions, self._positions + 1)
            or (table is not self._table and not self._begins(table))
        ):
            return False
        self._positions = batch.positions
        return True

    def _begins(self, table: NDArray[np.int32]) -> bool:
        """Its pages that are in use begin `table`, too."""
        pages = self._table.shape[1]
        return table.shape[1] >= pages and bool(((table[:, :pages] == self._table) | ~self._used).all())

    def draws_on(self, batch: Batch) -> bool:
        """All rows of one that goes on begin with the tokens that the last step drew for them, and draw one more each,
        in the batch's order, which is `answers`."""
        if batch.wants is not self._wants:
            self._wants, self._draws = batch.wants, self._in_order and bool((batch.wants == Want.TOKEN).all())
        return self._draws and np.array_equal(batch.carry, self.answers)
