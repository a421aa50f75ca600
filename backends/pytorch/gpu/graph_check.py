"""Checks of captured graphs and of a second stream for `localllm selftest`: what ops alone do not show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ....kernels.ops import Ops
from ....kernels.ops.cases import CASES
from ....kernels.ops.cases.case import Case
from ....kernels.ops.cases.reference_check import copy_to, device_arguments, mismatch, reference_run
from ....kernels.ops.streams import Streams
from ..device import NO_ROWS, Captured, Recorder
from ..product_check import ProductResult

SHARES = (0.4, 1.0, 0.0)  # of the captured contexts; 0: contexts of one position
ROUNDS = 100

Test = tuple[str, Callable[[], str]]  # title, and a function that returns the defect


def run(tests: Iterable[Test]) -> Iterator[ProductResult]:
    for title, check in tests:
        try:
            with torch.inference_mode():
                defect = check()
        except Exception as error:  # drivers raise many kinds of errors
            defect = f"fails: {type(error).__name__}: {error}".partition("\n")[0]
        yield ProductResult(title, defect)


@dataclass(frozen=True, slots=True)
class GraphChecks:
    """The checks of a device. `device`: torch's type of it."""

    ops: Ops
    device: str
    dtype: torch.dtype
    recorder: Callable[[], Recorder]
    streams: Callable[[], Streams]

    def tests(self, cases: Sequence[str]) -> list[Test]:
        """`cases`: of decode, as in kernels/ops/cases."""
        captured = (case for case in CASES if str(case) in cases)
        graphs = [(f"graph of {case.op} with other contexts", partial(self._graph, case)) for case in captured]
        return [*graphs, ("order of two streams", self._streams)]

    def _graph(self, case: Case) -> str:
        """The defect of a captured op that is replayed with other contexts than those of its capture."""
        reference = dict(Ops())[case.op]
        arguments, _ = reference_run(case, reference, self.dtype)
        on_device = device_arguments(case, self.ops, arguments, self.device, self.dtype)
        rows = replace(on_device["rows"], exact=False)
        output, replay = self._captured(lambda: dict(self.ops)[case.op](**{**on_device, "rows": rows}))
        for share in SHARES:
            contexts = tuple(max(1, int(share * context)) for context in rows.contexts)
            lens = torch.tensor(contexts, dtype=torch.int32)
            rows.context_lens.copy_(lens)
            replay(lens.numpy())
            changed = replace(arguments["rows"], context_lens=lens, contexts=contexts)
            wide = {name: copy_to(value, "cpu", wide=True) for name, value in (arguments | {"rows": changed}).items()}
            defect = mismatch([output], [reference(**wide)], case.tolerances[self.dtype])
            if defect:
                return f"with contexts {contexts} it {defect}"
        return ""

    def _captured(self, work: Callable[[], Tensor]) -> tuple[Tensor, Captured]:
        recorder = self.recorder()
        with recorder.session():
            work()
            recorder.begin()
            output = work()
            return output, recorder.end()

    def _streams(self) -> str:
        """The defect of work on a second stream between a fork and a join, in a captured graph."""
        streams = self.streams()
        x = torch.ones(1024, 1024, device=self.device)

        def work() -> Tensor:
            y = x + 1.0
            with streams.fork():
                side = y * 2.0
            main = y * 3.0
            streams.join()
            return side + main

        output, replay = self._captured(work)
        for number in range(ROUNDS):
            x.fill_(float(number))
            replay(NO_ROWS)
            if not (output == 5.0 * (number + 1)).all().item():
                return f"a wrong sum in round {number}"
        return ""
