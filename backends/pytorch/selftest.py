"""The self-test of the kernels. Before a model is served, every op of a device computes its small test cases. An op
that is wrong, fails or returns NaN is replaced by the next correct candidate. The last candidate is the reference.

    candidates   CUDA C++   Triton   reference
    op a            ok
    op b          wrong       ok                   -> Triton computes b; the runner warns
    op c          wrong      fails    (not tested)

The verdicts are cached in a file, so later starts test nothing. The file's name has a hash of all versions that the
verdicts depend on. CrashMark names a kernel that crashes the process or hangs longer than TEST_SECONDS. The kernel is
replaced after two crashes in a row, because a user may have killed the process during the first test.
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
from ...kernels.ops import Ops
from ...kernels.ops.cases import CASES
from ...kernels.ops.cases.case import Case
from ...kernels.ops.cases.reference_check import call_op, device_arguments, mismatch, reference_run
from ..selftest_results import CrashMark, SelfTestResults
from .failures import is_shortage

MAX_REASON = 160  # characters
SECONDS = 0.2  # seconds after which the test of an op starts no further case
TEST_SECONDS = 120.0  # seconds after which a test counts as hung and the process ends: a kernel cannot be interrupted
KERNELS = Path(kernels.__file__).parent  # the sources of all kernels and cases
STDERR = 2  # the file descriptor, because sys.stderr may be replaced
MAX_CASES = 8  # tested cases per op, evenly spread over all its cases; the test suite runs all cases

Verify = Callable[[str, Ops], str]  # (name of an op, ops) -> the defect of this op, empty if it is right


def choose(candidates: Sequence[Ops], verify: Verify) -> tuple[Ops, tuple[str, ...]]:
    """The ops of the first candidate, and warnings. An op that fails is replaced by the op of the next candidate that
    passes, with a warning. The last candidate is the references, which `verify` must accept."""
    first, *others = candidates
    ops = first
    warnings = []
    for name, _ in first:
        reason = verify(name, ops)
        if reason:
            replacements = (ops.with_ops_of(other, [name]) for other in others)
            replaced = next(replacement for replacement in replacements if not verify(name, replacement))
            warnings.append(f"{name}: {replaced.title(name)} instead of {ops.title(name)}, which {reason}")
            ops = replaced
    return ops, tuple(warnings)


def self_tested(
    candidates: Sequence[Ops],
    device: str,
    dtype: torch.dtype,
    folder: Path,
    device_title: str,
    versions: Iterable[str],
) -> tuple[Ops, tuple[str, ...]]:
    """The result of `choose` on the test cases, for torch's `device` and models of `dtype`. The verdicts of an earlier
    start are read from `folder`.

    `device_title` is the display name of the device; the verdicts also depend on `versions`. Raises ModelRefused if a
    kernel breaks the device. The next start replaces this kernel, and any kernel whose test crashed twice.
    """
    facts = [device_title, str(dtype), torch.__version__, sources_hash(KERNELS), *versions]
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    results = SelfTestResults.read(folder / f"{device}-{key[:16]}.json", device_title)
    with CrashMark(results.file.with_suffix(".running")) as mark:
        if mark.crashed_twice:
            reason = "crashed or hung twice in its self-test"
            results.verdicts[mark.crashed] = f"{reason} (delete {results.file} to test it again)"
            results.write([f"{mark.crashed} {reason}"])
        return _Testing(device, dtype, results, mark).choose(candidates)


class _Testing:
    """Calls the function `choose` with the cached verdicts in `results`. Runs the tests that have no verdict yet, and
    adds their verdicts to the file."""

    def __init__(self, device: str, dtype: torch.dtype, results: SelfTestResults, mark: CrashMark) -> None:
        self._device = device
        self._dtype = dtype
        self._results = results
        self._mark = mark

    def choose(self, candidates: Sequence[Ops]) -> tuple[Ops, tuple[str, ...]]:
        cached = dict(self._results.verdicts)
        ops, fallbacks = choose(candidates, self._verify)
        if self._mark.crashed or self._results.verdicts != cached:
            self._results.write(fallbacks)
        return ops, fallbacks

    def _verify(self, name: str, ops: Ops) -> str:
        verdicts = self._results.verdicts
        title = f"{name}: {ops.title(name)}"
        if ops.title(name) == "reference":
            return ""
        if title not in verdicts:
            self._mark.write(title)
            try:
                with _watched():
                    verdicts[title] = find_defect(name, ops, self._device, self._dtype)
            except OutOfMemory as error:  # no verdict on the kernel: the next start tests it again
                return str(error)
            if not _usable(self._device):
                raise self._broken_device(name, title)
        return verdicts[title]

    def _broken_device(self, name: str, title: str) -> ModelRefused:
        """The error after a test that broke the device. Writes the verdict on the kernel to the file."""
        results = self._results
        reason = results.verdicts[title] or "the device cannot compute anything afterwards"
        results.verdicts[title] = reason
        results.write([f"{title} broke the device: {reason}"])
        return ModelRefused(
            f"the kernel of {name} caused a device error on {results.device} in its self-test: {reason}",
            "load the model again; the next start does not use that kernel",
        )


@contextmanager
def _watched() -> Iterator[None]:
    """Ends the process, with a stack trace on stderr, if the block takes longer than TEST_SECONDS."""
    faulthandler.dump_traceback_later(TEST_SECONDS, exit=True, file=STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def find_defect(name: str, ops: Ops, device: str, dtype: torch.dtype) -> str:
    """The defect of the op, empty if all tested cases pass. Raises OutOfMemory if a case does not fit in memory."""
    start = time.perf_counter()
    for case in _sample([case for case in CASES if case.op == name]):
        with torch.inference_mode():  # as in steps: with derivatives, torch may call other kernels
            defect = _defect(case, ops, device, dtype)
        if defect:
            return f"{defect} (case {case.label})"
        if time.perf_counter() - start > SECONDS:  # out of time, e.g. because kernels are compiled at their first use
            break
    return ""


def _defect(case: Case, ops: Ops, device: str, dtype: torch.dtype) -> str:
    case_dtype = dtype if dtype in case.tolerances else next(iter(case.tolerances))
    arguments, expected = reference_run(case, dict(Ops())[case.op], case_dtype)
    try:
        output = call_op(case, dict(ops)[case.op], device_arguments(case, ops, arguments, device, case_dtype))
        return mismatch(output, expected, case.tolerances[case_dtype])
    except Exception as error:  # compilers and drivers raise many kinds of errors
        message = f"fails: {type(error).__name__}: {error}".partition("\n")[0][:MAX_REASON]
        if is_shortage(error):
            raise OutOfMemory(message) from error
        return message


def _sample(cases: list[Case]) -> list[Case]:
    """At most MAX_CASES cases, evenly spread. The first and the last case come first: they are the extremes."""
    count = min(len(cases), MAX_CASES)
    chosen = [cases[index * (len(cases) - 1) // max(count - 1, 1)] for index in range(count)]
    return [*chosen[:1], *chosen[:0:-1]]


def _usable(device: str) -> bool:
    """Whether the device can still compute: after some errors every call fails."""
    try:
        return torch.ones(1, device=device).item() == 1.0
    except RuntimeError as error:
        return is_shortage(error)


@cache
def sources_hash(folder: Path) -> str:
    """SHA-256 of the Python sources in the folder."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
