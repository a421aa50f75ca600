"""The self-test of the kernels: an op that is wrong, fails or returns NaN is replaced by the next candidate. The result
is cached, so that later starts test nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.backends import selftest_results
from localllm.backends.pytorch import selftest
from localllm.backends.pytorch.selftest import self_tested
from localllm.engine.errors import ModelRefused
from localllm.kernels.ops import Ops
from localllm.kernels.ops.activation import Activation
from localllm.kernels.ops.norm import Norm

PLAIN = Ops()


def wrong(*arguments: Any, **named: Any) -> Any:
    return PLAIN.norm.rms(*arguments, **named) * 1.5


def without_numbers(*arguments: Any, **named: Any) -> Any:
    return PLAIN.norm.rms(*arguments, **named) * torch.nan


def failing(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError("no kernel image\nand more")


def right(*arguments: Any, **named: Any) -> Any:
    return PLAIN.norm.rms(*arguments, **named)


def of_another_shape(*arguments: Any, **named: Any) -> Any:
    return PLAIN.norm.rms(*arguments, **named)[None]


def with_rms(rms: Callable[..., Any]) -> Ops:
    return replace(PLAIN, norm=replace(Norm(), rms=rms))


def run(folder: Path, *lanes: Ops, versions: tuple[str, ...] = ()) -> tuple[Ops, tuple[str, ...]]:
    return self_tested((*lanes, PLAIN), "cpu", torch.bfloat16, folder, "a chip", versions)


def test_correct_ops_stay(tmp_path: Path) -> None:
    ops, warnings = run(tmp_path, with_rms(right), PLAIN)
    assert ops.norm.rms is right
    assert warnings == ()


@pytest.mark.parametrize(
    ("rms", "reason"),
    [
        (wrong, "is off by"),
        (without_numbers, "returns NaN"),
        (failing, "fails: RuntimeError: no kernel image"),
        (of_another_shape, "returns the wrong shape"),
    ],
)
def test_wrong_op_is_replaced_by_the_next_candidate(tmp_path: Path, rms: Callable[..., Any], reason: str) -> None:
    ops, warnings = run(tmp_path, with_rms(rms), with_rms(right))
    assert ops.norm.rms is right
    assert len(warnings) == 1
    assert warnings[0].startswith(f"norm.rms: {__name__}.right instead of {__name__}.{rms.__name__}, which {reason}")
    assert "and more" not in warnings[0]


def test_reference_is_the_last_candidate(tmp_path: Path) -> None:
    ops, warnings = run(tmp_path, with_rms(wrong), with_rms(without_numbers))
    assert ops.norm.rms is PLAIN.norm.rms
    assert warnings[0].startswith("norm.rms: reference instead of ")


def test_other_ops_are_not_replaced(tmp_path: Path) -> None:
    def doubled(*arguments: Any, **named: Any) -> Any:
        return PLAIN.activation.silu_and_mul(*arguments, **named) * 2

    def gelu(*arguments: Any, **named: Any) -> Any:
        return PLAIN.activation.gelu_and_mul(*arguments, **named)

    fast = replace(PLAIN, activation=replace(Activation(), silu_and_mul=doubled, gelu_and_mul=gelu))
    ops, warnings = run(tmp_path, fast)
    assert ops.activation.gelu_and_mul is gelu
    assert ops.activation.silu_and_mul is PLAIN.activation.silu_and_mul
    assert [line.partition(":")[0] for line in warnings] == ["activation.silu_and_mul"]


def test_later_start_tests_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(tmp_path, with_rms(wrong))
    monkeypatch.setattr(selftest, "call_op", failing)
    assert run(tmp_path, with_rms(wrong)) == first
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text("utf-8"))["fallbacks"] == list(first[1])
    assert run(tmp_path, with_rms(right), versions=("another library",))[1], "of other versions nothing is known"
    assert run(tmp_path, with_rms(wrong)) == first


def test_changed_kernel_sources_repeat_the_self_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of one file in a folder of kernels is enough."""
    (tmp_path / "kernels" / "triton").mkdir(parents=True)
    file = tmp_path / "kernels" / "triton" / "norm.py"
    monkeypatch.setattr(selftest, "KERNELS", tmp_path / "kernels")
    monkeypatch.setattr(selftest, "sources_hash", selftest.sources_hash.__wrapped__)
    for count, text in enumerate(("one", "two", "one"), 1):
        file.write_text(text, "utf-8")
        run(tmp_path / "found", with_rms(right))
        assert len(list((tmp_path / "found").iterdir())) == min(count, 2)


@pytest.mark.parametrize(("seconds", "cases"), [(0.0, 8), (0.15, 2), (0.3, 1)])
def test_slow_op_runs_fewer_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, cases: int) -> None:
    """A first start that compiles each kernel for each case would take minutes."""
    now, calls = 0.0, 0

    def rms(*arguments: Any, **named: Any) -> Any:
        nonlocal now, calls
        now, calls = now + seconds, calls + 1
        return right(*arguments, **named)

    monkeypatch.setattr(selftest.time, "perf_counter", lambda: now)
    assert run(tmp_path, with_rms(rms))[1] == ()
    assert calls == cases


def test_unreadable_results_repeat_the_self_test(tmp_path: Path) -> None:
    first = run(tmp_path, with_rms(wrong))
    (file,) = tmp_path.iterdir()
    for text in ("", "[]", '{"verdicts": 1}', "{"):
        file.write_text(text, "utf-8")
        assert run(tmp_path, with_rms(wrong)) == first
    assert json.loads(file.read_text("utf-8"))["verdicts"]


def test_self_test_runs_without_a_writable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run(tmp_path / "file" / "in", with_rms(wrong))[1]


@pytest.mark.parametrize("rms", [failing, right], ids=["and fails", "after its answers"])
def test_kernel_that_breaks_the_device_is_replaced_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rms: Callable[..., Any]
) -> None:
    monkeypatch.setattr(selftest, "_usable", lambda device: False)
    with pytest.raises(ModelRefused, match=r"norm\.rms caused a device error on a chip in its self-test: .+") as raised:
        run(tmp_path, with_rms(rms))
    assert "the next start does not use" in raised.value.hint
    monkeypatch.undo()
    ops, warnings = run(tmp_path, with_rms(rms))
    assert ops.norm.rms is PLAIN.norm.rms
    assert warnings
    (line,) = selftest_results.newest(tmp_path).values()
    assert line.startswith(f"norm.rms: {__name__}.{rms.__name__} broke the device: ")


def test_out_of_memory_gives_no_verdict(tmp_path: Path) -> None:
    """Another process may use the memory: this start uses the next candidate, and later starts test again."""
    short = True

    def rms(*arguments: Any, **named: Any) -> Any:
        if short:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(*arguments, **named)

    ops, warnings = run(tmp_path, with_rms(rms))
    assert ops.norm.rms is PLAIN.norm.rms
    assert "which fails: OutOfMemoryError: CUDA out of memory" in warnings[0]
    short = False
    assert run(tmp_path, with_rms(rms)) == (with_rms(rms), ())


# Another process that tests lanes; one of them does this.
ENDING = f"""
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_selftest as t

def ending(*arguments, **named):
    {{}}

ending.__module__ = t.__name__
t.selftest.TEST_SECONDS = float(sys.argv[2])
print(t.run(Path(sys.argv[1]), t.with_rms(ending), t.with_rms(t.right)))
"""
KILLED, ENDLESS = "os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(3600)"


def start_of(does: str, folder: Path, seconds: float = 1.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ENDING.format(does), str(folder), str(seconds)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(("does", "code"), [(KILLED, -9), (ENDLESS, 1)], ids=["kills", "never ends"])
def test_kernel_that_crashes_twice_is_replaced(tmp_path: Path, does: str, code: int) -> None:
    for _ in range(2):
        first = start_of(does, tmp_path)
        _, said = first.communicate(timeout=100)
        assert first.returncode == code, said
        assert ("Timeout" in said) == (code == 1), "its log says where it hung"

    def ending(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("a kernel that crashed twice is called again")

    ending.__module__ = "test_selftest"  # the name of this module in the processes
    for _ in range(2):
        ops, warnings = run(tmp_path, with_rms(ending), with_rms(right))
        assert ops.norm.rms is right
        instead = f"norm.rms: {__name__}.right instead of test_selftest.ending"
        assert len(warnings) == 1
        assert warnings[0].startswith(f"{instead}, which crashed or hung twice in its self-test")
        (line,) = selftest_results.newest(tmp_path).values()
        assert "test_selftest.ending, which crashed or hung twice in its self-test" in line
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]


def test_stopped_process_gives_no_verdict(tmp_path: Path) -> None:
    start_of(KILLED, tmp_path).communicate(timeout=100)

    def ending(*arguments: Any, **named: Any) -> Any:
        return right(*arguments, **named)

    ending.__module__ = "test_selftest"
    for _ in range(2):
        ops, warnings = run(tmp_path, with_rms(ending))
        assert (ops.norm.rms, warnings) == (ending, ())
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]


def test_deleted_mark_has_no_name(tmp_path: Path) -> None:
    """Another process may open the file before it is deleted, and lock it afterwards."""
    file = tmp_path / "chip.running"
    with selftest_results.CrashMark(file) as mark:
        mark.write("norm.rms: right")
        opened = file.open()
    with opened:
        assert not file.exists()
        assert opened.read() == ""


def test_mark_of_a_crash_is_deleted_without_tests(tmp_path: Path) -> None:
    file = tmp_path / "chip.running"
    file.write_text("norm.rms: right", "utf-8")
    with selftest_results.CrashMark(file) as mark:
        assert (mark.crashed, mark.crashed_twice) == ("norm.rms: right", False)
    assert not file.exists()


def test_mark_of_a_running_process_is_no_crash(tmp_path: Path) -> None:
    from ..waiting import wait_until  # other processes import this file without its package

    testing = start_of(f"Path({str(tmp_path / 'begun')!r}).touch(); time.sleep(60)", tmp_path / "found", 60.0)
    try:
        wait_until(lambda: (tmp_path / "begun").exists() or testing.poll() is not None)

        def ending(*arguments: Any, **named: Any) -> Any:
            return right(*arguments, **named)

        ending.__module__ = "test_selftest"
        ops, warnings = run(tmp_path / "found", with_rms(ending))
        assert (ops.norm.rms, warnings) == (ending, ())
        assert len(list((tmp_path / "found").glob("*.running"))) == 1, "it is the other's"
    finally:
        testing.kill()
        testing.communicate()


def test_all_ops_except_packing_are_tested(tmp_path: Path) -> None:
    """The candidates are wrapped references: each is called, and passes."""
    wrapped = PLAIN
    for name, implementation in PLAIN:
        family, _, op = name.partition(".")

        def disguised(*arguments: Any, own: Any = implementation, **named: Any) -> Any:
            return own(*arguments, **named)

        wrapped = replace(wrapped, **{family: replace(getattr(wrapped, family), **{op: disguised})})
        disguised.__name__ = name
    ops, warnings = run(tmp_path, wrapped)
    assert warnings == ()
    assert ops == wrapped
    (file,) = tmp_path.iterdir()
    assert len(json.loads(file.read_text("utf-8"))["verdicts"]) == len(list(PLAIN))


def test_doctor_lists_self_test_outcomes(tmp_path: Path) -> None:
    assert selftest_results.newest(tmp_path / "none") == {}
    run(tmp_path, with_rms(right))
    (tmp_path / "broken.json").write_text("[]", "utf-8")
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    (line,) = selftest_results.newest(tmp_path).values()
    assert line.startswith("all 1 kernels are right (")
    run(tmp_path, with_rms(wrong))
    ((device, line),) = selftest_results.newest(tmp_path).items()
    assert device == "a chip"
    assert line.startswith("norm.rms: reference instead of ")


def test_results_are_written_to_a_new_folder(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "chip.json"
    selftest_results.SelfTestResults(file, "a chip", {"norm.rms: right": "", "kv.store: wrong": "is off"}).write(
        ["kv.store: wrong"]
    )
    results = selftest_results.SelfTestResults.read(file, "a chip")
    assert results.verdicts == {"norm.rms: right": "", "kv.store: wrong": "is off"}
    assert json.loads(file.read_text("utf-8"))["fallbacks"] == ["kv.store: wrong"]
    assert [each.name for each in file.parent.iterdir()] == ["chip.json"]


def test_failed_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    file = tmp_path / "chip.json"
    (file / "in the way").mkdir(parents=True)
    selftest_results.SelfTestResults(file, "a chip", {}).write()
    assert [each.name for each in tmp_path.iterdir()] == ["chip.json"]


def test_doctor_lists_the_newest_outcome_of_a_device(tmp_path: Path) -> None:
    outcomes = (("one", 300, ["x is off", "y is off"]), ("two", 100, []), ("three", 200, []))
    for name, at, fallbacks in outcomes:
        file = tmp_path / f"{name}.json"
        selftest_results.SelfTestResults(file, "a chip", {"norm.rms: right": ""}).write(fallbacks)
        os.utime(file, (at, at))
    selftest_results.SelfTestResults(tmp_path / "other.json", "another", {}).write()
    warnings = selftest_results.newest(tmp_path)
    assert set(warnings) == {"a chip", "another"}
    assert warnings["a chip"].startswith("x is off; y is off (")


def test_mark_is_locked_and_reports_a_repeated_crash(tmp_path: Path) -> None:
    file = tmp_path / "new" / "chip.running"
    with selftest_results.CrashMark(file) as mark:
        assert not file.exists(), "nothing is tested yet"
        mark.write("norm.rms: right, with a long name")
        mark.write("kv.store: right")
        assert file.read_text("utf-8") == "kv.store: right"
        assert file.stat().st_mode & 0o777 == 0o600
        with selftest_results.CrashMark(file) as other:
            assert (other.crashed, other.crashed_twice) == ("", False), "it is another's that still runs"
            free = os.dup(0)
            os.close(free)
            other.write("norm.rms: right")
            again = os.dup(0)
            os.close(again)
            assert again == free, "nothing is left open"
            assert file.read_text("utf-8") == "kv.store: right"
        assert file.exists()
    assert not file.exists()
    file.write_text("kv.store: right", "utf-8")
    with selftest_results.CrashMark(file) as mark:
        assert (mark.crashed, mark.crashed_twice) == ("kv.store: right", False)
        mark.write("norm.rms: right")
        assert file.read_text("utf-8") == "norm.rms: right"
        mark.write("kv.store: right")
        assert file.read_text("utf-8") == "kv.store: right\nagain"
    file.write_text("kv.store: right\nagain", "utf-8")
    mark = selftest_results.CrashMark(file)
    with pytest.raises(ValueError, match="broken"), mark:
        raise ValueError("broken")
    assert (mark.crashed, mark.crashed_twice) == ("kv.store: right", True)
    assert not file.exists(), "an error did not end the process"
