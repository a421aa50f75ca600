"""The self-test of the kernels. Before a model is served, every op of a device computes its small test cases. An op
that is wrong, fails or returns NaN is replaced by the next lane that is right; the last lane is the reference.

    lanes    CUDA C++   Triton   reference
    op a        ok
    op b      wrong       ok                   -> Triton computes b; the runner warns
    op c      wrong      fails    (not tested)

The verdicts are cached in a file, whose name has a hash of all versions that they depend on: later starts test nothing.
CrashMark records a kernel that crashes the process or hangs longer than TEST_SECONDS. It is replaced after two crashes
in a row, because somebody may have killed the process during the first test.
"""

from __future__ import annotations

import faulthandler
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from ... import kernels
from ...engine.errors import ModelRefused, OutOfMemory
from ...kernels.ops import CASES, Ops
from ...kernels.ops.case import Case
from ...kernels.ops.reference_check import call_op, device_arguments, mismatch, reference_run
from ..selftest_results import CrashMark, SelfTestResults
from .failures import is_shortage

MAX_REASON = 160  # characters
SECONDS = 0.2  # an op starts no further case after this time
TEST_SECONDS = 120.0  # a longer test hangs: the process ends, because a kernel cannot be interrupted
STDERR = 2  # the descriptor: sys.stderr may be replaced
MAX_CASES = 8  # tested cases per op, evenly spread; the test suite has all cases

Verify = Callable[[str, Ops], str]  # (name of an op, ops) -> the defect of this op; empty: none


def choose(lanes: Sequence[Ops], verify: Verify) -> tuple[Ops, tuple[str, ...]]:
    """The ops of the first lane, where the first other lane that passes replaces an op that fails, and a warning for
    each replacement. The last lane is the references, which `verify` must accept."""
    ops, *others = lanes
    warnings = []
    for name, _ in lanes[0]:
        reason = verify(name, ops)
        if reason:
            instead = next(trial for lane in others if not verify(name, trial := ops.with_ops_of(lane, [name])))
            warnings.append(f"{name}: {instead.title(name)} instead of {ops.title(name)}, which {reason}")
            ops = instead
    return ops, tuple(warnings)


def self_tested(
    lanes: Sequence[Ops], device: str, dtype: torch.dtype, folder: Path, on: str, versions: Iterable[str]
) -> tuple[Ops, tuple[str, ...]]:
    """The result of `choose` on the test cases, for torch's `device` and models of `dtype`. The verdicts of an earlier
    start are read from `folder`.

    `on` is the display name of the device; `versions` are further versions that the verdicts depend on. Raises
    ModelRefused if a kernel breaks the device. The next start replaces this kernel, and any that crashed twice.
    """
    key = hashlib.sha256("\n".join([on, str(dtype), torch.__version__, _sources(), *versions]).encode()).hexdigest()
    results = SelfTestResults.read(folder / f"{device}-{key[:16]}.json", on)
    with CrashMark(results.file.with_suffix(".running")) as under_test:
        if under_test.twice:
            reason = "crashed or hung twice in its self-test"
            results.verdicts[under_test.left] = f"{reason} (made again without {results.file})"
            results.write([f"{under_test.left} {reason}"])
        return _self_tested(lanes, device, dtype, results, under_test)


def _self_tested(
    lanes: Sequence[Ops], device: str, dtype: torch.dtype, results: SelfTestResults, under_test: CrashMark
) -> tuple[Ops, tuple[str, ...]]:
    """`choose`, with verdicts from `results`. Runs the missing tests, adds their verdicts and writes the file."""
    known = dict(results.verdicts)

    def verify(name: str, ops: Ops) -> str:
        title = f"{name}: {ops.title(name)}"
        if ops.title(name) == "reference":
            return ""
        if title not in results.verdicts:
            under_test.name(title)
            try:
                with _watched():
                    results.verdicts[title] = _fault(name, ops, device, dtype)
            except OutOfMemory as error:  # no verdict on the kernel: the next start tests it again
                return str(error)
            if not _usable(device):
                reason = results.verdicts[title] = results.verdicts[title] or "leaves nothing that can be computed on"
                results.write([f"{title} broke the device: {reason}"])
                raise ModelRefused(
                    f"the kernel of {name} caused a device error on {results.device} in its self-test: {reason}",
                    "load the model again; the next start does not use that kernel",
                )
        return results.verdicts[title]

    ops, fallbacks = choose(lanes, verify)
    if under_test.left or results.verdicts != known:
        results.write(fallbacks)
    return ops, fallbacks


@contextmanager
def _watched() -> Iterator[None]:
    """Ends the process, with a stack trace on stderr, if the block takes longer than TEST_SECONDS."""
    faulthandler.dump_traceback_later(TEST_SECONDS, exit=True, file=STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _fault(name: str, ops: Ops, device: str, dtype: torch.dtype) -> str:
    """The defect of the op; empty: none. Raises OutOfMemory if a case does not fit in memory."""
    start = time.perf_counter()
    for case in _few([case for case in CASES if case.op == name]):
        case_dtype = dtype if dtype in case.tolerances else next(iter(case.tolerances))
        arguments, expected = reference_run(case, dict(Ops())[name], case_dtype)
        try:
            output = call_op(case, dict(ops)[name], device_arguments(case, ops, arguments, device, case_dtype))
            defect = mismatch(output, expected, case.tolerances[case_dtype])
        except Exception as error:  # any error of a compiler or a driver
            defect = f"fails: {type(error).__name__}: {error}".partition("\n")[0][:MAX_REASON]
            if is_shortage(error):
                raise OutOfMemory(defect) from error
        if defect:
            return f"{defect} (case {case.label})"
        if time.perf_counter() - start > SECONDS:  # e.g. kernels that are compiled at their first use
            break
    return ""


def _few(cases: list[Case]) -> list[Case]:
    """At most MAX_CASES cases: the first, the last, then some between them."""
    most = min(len(cases), MAX_CASES)
    chosen = [cases[at * (len(cases) - 1) // max(most - 1, 1)] for at in range(most)]
    return [*chosen[:1], *chosen[:0:-1]]


def _usable(device: str) -> bool:
    """Whether the device still computes: after some errors every call fails."""
    try:
        return torch.ones(1, device=device).item() == 1.0
    except RuntimeError as error:
        return is_shortage(error)


@cache
def _sources() -> str:
    """SHA-256 of the Python sources of all kernels and cases."""
    digest = hashlib.sha256()
    for folder in map(Path, kernels.__path__):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
