"""The kernels' self-test: what is wrong, fails or returns NaN is left to the next lane, which is said, kept, and not
tested again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
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


def test_right_ops_are_kept(tmp_path: Path) -> None:
    ops, told = run(tmp_path, with_rms(right), PLAIN)
    assert ops.norm.rms is right
    assert told == ()


@pytest.mark.parametrize(
    ("rms", "reason"),
    [
        (wrong, "is off by"),
        (without_numbers, "returns NaN"),
        (failing, "fails: RuntimeError: no kernel image"),
        (of_another_shape, "returns the wrong shape"),
    ],
)
def test_what_is_wrong_is_left_to_the_next_lane(tmp_path: Path, rms: Callable[..., Any], reason: str) -> None:
    ops, told = run(tmp_path, with_rms(rms), with_rms(right))
    assert ops.norm.rms is right
    assert len(told) == 1
    assert told[0].startswith(f"norm.rms: {__name__}.right instead of {__name__}.{rms.__name__}, which {reason}")
    assert "and more" not in told[0]


def test_the_reference_is_last(tmp_path: Path) -> None:
    ops, told = run(tmp_path, with_rms(wrong), with_rms(without_numbers))
    assert ops.norm.rms is PLAIN.norm.rms
    assert told[0].startswith("norm.rms: reference instead of ")


def test_others_stay(tmp_path: Path) -> None:
    def doubled(*arguments: Any, **named: Any) -> Any:
        return PLAIN.activation.silu_and_mul(*arguments, **named) * 2

    def gelu(*arguments: Any, **named: Any) -> Any:
        return PLAIN.activation.gelu_and_mul(*arguments, **named)

    fast = replace(PLAIN, activation=replace(Activation(), silu_and_mul=doubled, gelu_and_mul=gelu))
    ops, told = run(tmp_path, fast)
    assert ops.activation.gelu_and_mul is gelu
    assert ops.activation.silu_and_mul is PLAIN.activation.silu_and_mul
    assert [line.partition(":")[0] for line in told] == ["activation.silu_and_mul"]


def test_a_later_start_tests_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(tmp_path, with_rms(wrong))
    monkeypatch.setattr(selftest, "call_op", failing)
    assert run(tmp_path, with_rms(wrong)) == first
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text("utf-8"))["fallbacks"] == list(first[1])
    assert run(tmp_path, with_rms(right), versions=("another library",))[1], "of other versions nothing is known"
    assert run(tmp_path, with_rms(wrong)) == first


def test_another_release_of_the_kernels_is_tested_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only a file's text changed, in a folder of them."""
    (tmp_path / "kernels" / "triton").mkdir(parents=True)
    file = tmp_path / "kernels" / "triton" / "norm.py"
    monkeypatch.setattr(selftest.kernels, "__path__", [str(tmp_path / "kernels")])
    monkeypatch.setattr(selftest, "_sources", selftest._sources.__wrapped__)
    for count, text in enumerate(("one", "two", "one"), 1):
        file.write_text(text, "utf-8")
        run(tmp_path / "found", with_rms(right))
        assert len(list((tmp_path / "found").iterdir())) == min(count, 2)


@pytest.mark.parametrize(("seconds", "cases"), [(0.0, 8), (0.15, 2), (0.3, 1)])
def test_cases_that_take_long_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, cases: int
) -> None:
    """A first start that compiles each kernel for each case would take minutes."""
    now, calls = 0.0, 0

    def rms(*arguments: Any, **named: Any) -> Any:
        nonlocal now, calls
        now, calls = now + seconds, calls + 1
        return right(*arguments, **named)

    monkeypatch.setattr(selftest.time, "perf_counter", lambda: now)
    assert run(tmp_path, with_rms(rms))[1] == ()
    assert calls == cases


def test_a_file_that_cannot_be_read_is_as_good_as_none(tmp_path: Path) -> None:
    first = run(tmp_path, with_rms(wrong))
    (file,) = tmp_path.iterdir()
    for text in ("", "[]", '{"verdicts": 1}', "{"):
        file.write_text(text, "utf-8")
        assert run(tmp_path, with_rms(wrong)) == first
    assert json.loads(file.read_text("utf-8"))["verdicts"]


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run(tmp_path / "file" / "in", with_rms(wrong))[1]


@pytest.mark.parametrize("rms", [failing, right], ids=["and fails", "after its answers"])
def test_a_kernel_that_breaks_the_device_is_left_out_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rms: Callable[..., Any]
) -> None:
    monkeypatch.setattr(selftest, "_usable", lambda device: False)
    with pytest.raises(ModelRefused, match=r"norm\.rms caused a device error on a chip in its self-test: .+") as raised:
        run(tmp_path, with_rms(rms))
    assert "the next start does not use" in raised.value.hint
    monkeypatch.undo()
    ops, told = run(tmp_path, with_rms(rms))
    assert ops.norm.rms is PLAIN.norm.rms
    assert told
    (line,) = selftest_results.newest(tmp_path).values()
    assert line.startswith(f"norm.rms: {__name__}.{rms.__name__} broke the device: ")


def test_too_little_memory_says_nothing_of_a_kernel(tmp_path: Path) -> None:
    """Another process may hold it just now: for this start the next lane, later ones test again."""
    short = True

    def rms(*arguments: Any, **named: Any) -> Any:
        if short:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(*arguments, **named)

    ops, told = run(tmp_path, with_rms(rms))
    assert ops.norm.rms is PLAIN.norm.rms
    assert "which fails: OutOfMemoryError: CUDA out of memory" in told[0]
    short = False
    assert run(tmp_path, with_rms(rms)) == (with_rms(rms), ())


# Another process that tests lanes of which one does this.
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
def test_a_kernel_that_ends_the_process_twice_is_left_out(tmp_path: Path, does: str, code: int) -> None:
    for _ in range(2):
        first = start_of(does, tmp_path)
        _, said = first.communicate(timeout=60)
        assert first.returncode == code, said
        assert ("Timeout" in said) == (code == 1), "its log says where it hung"
    for _ in range(2):
        told, said = start_of(does, tmp_path).communicate(timeout=60)
        instead = "norm.rms: test_selftest.right instead of test_selftest.ending"
        assert f"{instead}, which crashed or hung twice" in told, said
        (line,) = selftest_results.newest(tmp_path).values()
        assert "test_selftest.ending, which crashed or hung twice in its self-test" in line
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]


def test_a_process_that_is_stopped_while_it_tests_blames_no_kernel(tmp_path: Path) -> None:
    start_of(KILLED, tmp_path).communicate(timeout=60)

    def ending(*arguments: Any, **named: Any) -> Any:
        return right(*arguments, **named)

    ending.__module__ = "test_selftest"
    for _ in range(2):
        ops, told = run(tmp_path, with_rms(ending))
        assert (ops.norm.rms, told) == (ending, ())
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]


def test_a_process_that_is_about_to_look_reads_no_name_of_one_that_ended_well(tmp_path: Path) -> None:
    """It may have opened the file before that was removed, and lock it after."""
    file = tmp_path / "chip.running"
    with selftest_results.CrashMark(file) as mark:
        mark.write("norm.rms: right")
        opened = file.open()
    with opened:
        assert not file.exists()
        assert opened.read() == ""


def test_a_name_that_was_left_goes_also_where_nothing_is_tested(tmp_path: Path) -> None:
    file = tmp_path / "chip.running"
    file.write_text("norm.rms: right", "utf-8")
    with selftest_results.CrashMark(file) as mark:
        assert (mark.crashed, mark.crashed_twice) == ("norm.rms: right", False)
    assert not file.exists()


def test_another_process_that_tests_just_now_is_no_sign(tmp_path: Path) -> None:
    testing = start_of(f"Path({str(tmp_path / 'begun')!r}).touch(); time.sleep(60)", tmp_path / "found", 60.0)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "begun").exists() and testing.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)

        def ending(*arguments: Any, **named: Any) -> Any:
            return right(*arguments, **named)

        ending.__module__ = "test_selftest"
        ops, told = run(tmp_path / "found", with_rms(ending))
        assert (ops.norm.rms, told) == (ending, ())
        assert len(list((tmp_path / "found").glob("*.running"))) == 1, "it is the other's"
    finally:
        testing.kill()
        testing.communicate()


def test_every_op_but_what_packs_is_tested(tmp_path: Path) -> None:
    """References in disguise: each is computed once, and found right."""
    wrapped = PLAIN
    for name, implementation in PLAIN:
        family, _, op = name.partition(".")

        def disguised(*arguments: Any, own: Any = implementation, **named: Any) -> Any:
            return own(*arguments, **named)

        wrapped = replace(wrapped, **{family: replace(getattr(wrapped, family), **{op: disguised})})
        disguised.__name__ = name
    ops, told = run(tmp_path, wrapped)
    assert told == ()
    assert ops == wrapped
    (file,) = tmp_path.iterdir()
    assert len(json.loads(file.read_text("utf-8"))["verdicts"]) == len(list(PLAIN))


def test_what_doctor_tells(tmp_path: Path) -> None:
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


def test_findings_are_kept_in_a_folder_that_is_made(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "chip.json"
    selftest_results.SelfTestResults(file, "a chip", {"norm.rms: right": "", "kv.store: wrong": "is off"}).write(
        ["kv.store: wrong"]
    )
    kept = selftest_results.SelfTestResults.read(file, "a chip")
    assert kept.verdicts == {"norm.rms: right": "", "kv.store: wrong": "is off"}
    assert json.loads(file.read_text("utf-8"))["fallbacks"] == ["kv.store: wrong"]
    assert [each.name for each in file.parent.iterdir()] == ["chip.json"]


def test_findings_that_cannot_take_their_place_leave_nothing(tmp_path: Path) -> None:
    file = tmp_path / "chip.json"
    (file / "in the way").mkdir(parents=True)
    selftest_results.SelfTestResults(file, "a chip", {}).write()
    assert [each.name for each in tmp_path.iterdir()] == ["chip.json"]


def test_doctor_tells_of_the_newest_outcome_of_a_device(tmp_path: Path) -> None:
    outcomes = (("one", 300, ["x is off", "y is off"]), ("two", 100, []), ("three", 200, []))
    for name, at, fallbacks in outcomes:
        file = tmp_path / f"{name}.json"
        selftest_results.SelfTestResults(file, "a chip", {"norm.rms: right": ""}).write(fallbacks)
        os.utime(file, (at, at))
    selftest_results.SelfTestResults(tmp_path / "other.json", "another", {}).write()
    told = selftest_results.newest(tmp_path)
    assert set(told) == {"a chip", "another"}
    assert told["a chip"].startswith("x is off; y is off (")


def test_a_name_is_kept_while_its_test_goes_on_and_says_whether_it_was_left_before(tmp_path: Path) -> None:
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
