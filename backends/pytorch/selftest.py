"""The kernels' self-test: before a model is served, every op of a device computes its small cases, and one that is
wrong, fails or answers NaN is left to the next lane that is right, at last to the reference.

    lanes    CUDA C++   Triton   reference
    op a        ok
    op b      wrong       ok                   -> Triton computes b, and the runner says why
    op c      wrong      fails    (judges)

What was found is kept in a file, named after all that could change it, so that later starts test nothing. A kernel that
ends the process, or does not end within TEST_SECONDS, is known by what UnderTest kept: after the second time in a row
it is left out, as the first may have been a stop from outside.
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
from ...kernels.ops.judge import answer, asked, fault, given
from ..findings import Findings, UnderTest
from .failures import is_shortage

LONGEST_REASON = 160  # characters
SECONDS = 0.2  # that an op's cases may take, but for the one under way
TEST_SECONDS = 120.0  # after which an op's test hangs; the process ends then, as nothing else gets out of a kernel
STDERR = 2  # whatever became of sys.stderr
MOST_CASES = 8  # of an op, spread over all: a kernel that works here at all has its tests elsewhere

Verify = Callable[[str, Ops], str]  # an op of these, by name -> what is wrong with it; empty: nothing


def choose(lanes: Sequence[Ops], verify: Verify) -> tuple[Ops, tuple[str, ...]]:
    """The first lane's ops, each that fails replaced by the first lane's that does not, and for people what was
    replaced and why. The last lane is the references, which `verify` finds right."""
    ops, *others = lanes
    told = []
    for name, _ in lanes[0]:
        reason = verify(name, ops)
        if reason:
            instead = next(trial for lane in others if not verify(name, trial := ops.with_ops_of(lane, [name])))
            told.append(f"{name}: {instead.title(name)} instead of {ops.title(name)}, which {reason}")
            ops = instead
    return ops, tuple(told)


def self_tested(
    lanes: Sequence[Ops], device: str, dtype: torch.dtype, folder: Path, on: str, versions: Iterable[str]
) -> tuple[Ops, tuple[str, ...]]:
    """`choose` by the cases, or by what an earlier start found in the folder: for torch's `device`, models of `dtype`.

    `on` is the device for people; `versions` say what else the outcome depends on. Raises ModelRefused when a kernel
    breaks the device; the next start does without it, as without one that ended the process twice.
    """
    key = hashlib.sha256("\n".join([on, str(dtype), torch.__version__, _sources(), *versions]).encode()).hexdigest()
    findings = Findings.read(folder / f"{device}-{key[:16]}.json", on)
    with UnderTest(findings.file.with_suffix(".running")) as under_test:
        if under_test.twice:
            reason = "crashed or hung twice in its self-test"
            findings.verdicts[under_test.left] = f"{reason} (made again without {findings.file})"
            findings.write([f"{under_test.left} {reason}"])
        return _self_tested(lanes, device, dtype, findings, under_test)


def _self_tested(
    lanes: Sequence[Ops], device: str, dtype: torch.dtype, findings: Findings, under_test: UnderTest
) -> tuple[Ops, tuple[str, ...]]:
    """What was found so far grows, and is written."""
    known = dict(findings.verdicts)

    def verify(name: str, ops: Ops) -> str:
        title = f"{name}: {ops.title(name)}"
        if ops.title(name) == "reference":
            return ""
        if title not in findings.verdicts:
            under_test.name(title)
            try:
                with _watched():
                    findings.verdicts[title] = _fault(name, ops, device, dtype)
            except OutOfMemory as error:  # says nothing of the kernel: the next start tests it again
                return str(error)
            if not _usable(device):
                reason = findings.verdicts[title] = findings.verdicts[title] or "leaves nothing that can be computed on"
                findings.write([f"{title} broke the device: {reason}"])
                raise ModelRefused(
                    f"the kernel of {name} caused a device error on {findings.device} in its self-test: {reason}",
                    "load the model again; the next start does not use that kernel",
                )
        return findings.verdicts[title]

    ops, fallbacks = choose(lanes, verify)
    if under_test.left or findings.verdicts != known:
        findings.write(fallbacks)
    return ops, fallbacks


@contextmanager
def _watched() -> Iterator[None]:
    """Ends the process, with a word to its log, when this takes longer than TEST_SECONDS."""
    faulthandler.dump_traceback_later(TEST_SECONDS, exit=True, file=STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _fault(name: str, ops: Ops, device: str, dtype: torch.dtype) -> str:
    """What is wrong with the op; empty: nothing. Raises OutOfMemory where its cases find too little."""
    start = time.perf_counter()
    for case in _few([case for case in CASES if case.op == name]):
        own = dtype if dtype in case.tolerances else next(iter(case.tolerances))
        arguments, expected = asked(case, dict(Ops())[name], own)
        try:
            found = answer(case, dict(ops)[name], given(case, ops, arguments, device, own))
            wrong = fault(found, expected, case.tolerances[own])
        except Exception as error:  # whatever a compiler or a driver says
            wrong = f"fails: {type(error).__name__}: {error}".partition("\n")[0][:LONGEST_REASON]
            if is_shortage(error):
                raise OutOfMemory(wrong) from error
        if wrong:
            return f"{wrong} (case {case.label})"
        if time.perf_counter() - start > SECONDS:  # kernels that are compiled at their first use
            break
    return ""


def _few(cases: list[Case]) -> list[Case]:
    """The first, the last, then some in between."""
    most = min(len(cases), MOST_CASES)
    chosen = [cases[at * (len(cases) - 1) // max(most - 1, 1)] for at in range(most)]
    return [*chosen[:1], *chosen[:0:-1]]


def _usable(device: str) -> bool:
    """After some errors a device answers nothing any more."""
    try:
        return torch.ones(1, device=device).item() == 1.0
    except RuntimeError as error:
        return is_shortage(error)


@cache
def _sources() -> str:
    """Of all kernels and cases that are Python."""
    digest = hashlib.sha256()
    for folder in map(Path, kernels.__path__):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
