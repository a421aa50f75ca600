"""ISA variants and the thread team: settings apply or are refused, and results do not depend on the number of
threads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from localllm.backends.cpu.device import DEVICE
from localllm.kernels.ops.cases import CASES
from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.cases.reference_check import call_op, pack_value

cpu = pytest.importorskip("localllm.kernels.cpu", reason="the library is not built", exc_type=ImportError)

pytestmark = pytest.mark.real
LIBRARY = torch.ops.localllm
LANES = LIBRARY.variants().split()
SOURCES = Path(cpu.__file__).parent


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    lane, threads = LIBRARY.use_variant(os.environ.get("LOCALLLM_CPU_LANE", "")), LIBRARY.threads()
    few = LIBRARY.share_from(0)
    yield
    LIBRARY.share_from(few)
    LIBRARY.use_variant(lane)
    LIBRARY.use_threads(threads)


def answers(case: Case) -> list[torch.Tensor]:
    given = dict(case.make(torch.Generator().manual_seed(5), torch.float32))
    given |= {name: pack_value(DEVICE.ops, given[name], torch.float32) for name in case.packs}
    if "ops" in given:
        given["ops"] = DEVICE.ops
    return call_op(case, dict(DEVICE.ops)[case.op], given)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_do_not_depend_on_the_number_of_threads(case: Case) -> None:
    LIBRARY.use_threads(1)
    alone = answers(case)
    LIBRARY.use_threads(5)
    for one, other in zip(alone, answers(case), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("outputs", [1, 33, 700, 4096])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_each_output_is_computed_whatever_worker_takes_it(outputs: int, rows: int) -> None:
    """The system interrupts some of the 7 workers, so that the others take items of their shares."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 96, generator=generator)
    weight = torch.randn(outputs, 96, generator=generator)
    linear = DEVICE.ops.linear
    LIBRARY.use_threads(1)
    packed = linear.pack(weight, torch.float32)
    alone = linear.dense(x, packed)
    LIBRARY.use_threads(7)
    for _ in range(20):
        assert torch.equal(linear.dense(x, packed), alone)


def test_the_generic_variant_exists_and_the_last_variant_is_used() -> None:
    assert LANES[0] == "generic"
    assert LIBRARY.use_variant("") == LANES[-1]
    assert [LIBRARY.use_variant(lane) for lane in LANES] == LANES


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")
def test_a_native_build_has_the_variants_that_the_library_uses(tmp_path: Path) -> None:
    subprocess.run(
        ["c++", "-std=c++20", SOURCES / "isa" / "usable_variants.cpp", "-o", tmp_path / "usable_variants"], check=True
    )
    usable = subprocess.run([tmp_path / "usable_variants"], check=True, capture_output=True, text=True).stdout
    assert usable.split(";")[-1] == LANES[-1]
    assert set(LANES) <= set(usable.split(";"))


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")
@pytest.mark.parametrize("file", ["cpu_capacity", "cpufreq/cpuinfo_max_freq"])
def test_few_threads_use_the_fastest_cores(file: str, tmp_path: Path) -> None:
    """CPUs 0 and 3 are fast, 1 and 4 are slow, and the speed of 2 is unknown."""
    for cpu, speed in enumerate((1024, 400, None, 1024, 400)):
        described = tmp_path / f"cpu{cpu}" / file
        described.parent.mkdir(parents=True)
        if speed is not None:
            described.write_text(f"{speed}\n")
    (tmp_path / "main.cpp").write_text("""
        #include <cstdio>
        #include <cstdlib>
        #include "team/cores.h"
        int main(int, char** arguments) {
          for (int cpu : localllm::fastest({0, 1, 2, 3, 4}, std::atoi(arguments[1]), arguments[2]))
            std::printf("%d", cpu);
        }
    """)
    sources = [tmp_path / "main.cpp", SOURCES / "team" / "cores.cpp"]
    subprocess.run(["c++", "-std=c++20", f"-I{SOURCES}", *sources, "-o", tmp_path / "main"], check=True)
    chosen = []
    for count in range(1, 6):
        command = [tmp_path / "main", str(count), f"{tmp_path}/"]
        chosen.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert chosen == ["0", "03", "013", "0134", "01234"]


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")
def test_each_item_is_computed_once_and_a_slow_worker_computes_less(tmp_path: Path) -> None:
    sources = [SOURCES / "team" / name for name in ("team.cpp", "cores.cpp", "memory.cpp")]
    sources.append(Path(__file__).parent / "chunks.cpp")
    flags = ["-std=c++20", "-O1", "-pthread", f"-I{SOURCES}"]
    subprocess.run(["c++", *flags, *sources, "-o", tmp_path / "chunks"], check=True)
    ran = subprocess.run([tmp_path / "chunks"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    items = [int(count) for count in ran.stdout.split()]
    assert sum(items) == 64
    assert items[1] < 64 / 4, "the other workers take items of the slow one"


def test_an_unknown_variant_is_refused_and_nothing_changes() -> None:
    LIBRARY.use_variant("generic")
    with pytest.raises(RuntimeError, match=f'ISA variant "avx1024" is not available: .* have {", ".join(LANES)}'):
        LIBRARY.use_variant("avx1024")


def python(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_THREADS")}
    start = "import os, torch, localllm.kernels.cpu\nops = torch.ops.localllm\n"
    return subprocess.run(
        [sys.executable, "-c", start + program],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_the_environment_sets_the_variant_and_the_threads() -> None:
    asked = python("print(ops.use_threads(0))", LOCALLLM_CPU_LANE="generic", LOCALLLM_THREADS="3", OMP_NUM_THREADS="2")
    assert asked.stdout.split() == ["3"], asked.stderr
    refused = python("", LOCALLLM_CPU_LANE="avx1024")
    assert refused.returncode == 1
    assert f"this machine and build have {', '.join(LANES)}" in refused.stderr
    unreadable = python("ops.use_threads(0)", OMP_NUM_THREADS="many")
    assert 'OMP_NUM_THREADS is "many"; a number of threads' in unreadable.stderr


def test_a_forked_process_has_its_own_threads() -> None:
    """The parent's threads do not exist in the child. A child that waited for them would hang."""
    program = """
import warnings; torch.set_num_threads(1)  # OpenMP does not survive forks
warnings.simplefilter("ignore")
def norm():
    x = torch.randn(400, 512)
    out = torch.empty_like(x)
    ops.rms_norm(out, x, torch.ones(512), 1e-6, 0.0)
    return bool((out - torch.nn.functional.rms_norm(x, (512,), eps=1e-6)).abs().max() < 1e-5)
ops.use_threads(3)
assert norm()
if os.fork() == 0:
    os._exit(0 if norm() and ops.threads() == 3 else 1)
print(os.waitstatus_to_exitcode(os.wait()[1]), norm())
"""
    assert python(program).stdout.split() == ["0", "True"]


def test_concurrent_calls_run_one_after_another() -> None:
    program = """
from threading import Thread
ops.use_threads(2)
wrong = []
def norms():
    x = torch.randn(400, 512)
    expected = torch.nn.functional.rms_norm(x, (512,), eps=1e-6)
    for _ in range(200):
        out = torch.empty_like(x)
        ops.rms_norm(out, x, torch.ones(512), 1e-6, 0.0)
        if (out - expected).abs().max() > 1e-5:
            wrong.append(1)
threads = [Thread(target=norms) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(wrong))
"""
    assert python(program).stdout.split() == ["0"]


def test_threads_touch_their_share_first() -> None:
    LIBRARY.use_threads(2)
    memory = torch.ones(5 * 9000, dtype=torch.uint8)
    LIBRARY.first_touch(memory, 9000)
    touched = memory.eq(0).nonzero().flatten().tolist()
    assert touched == [*range(0, 27000, 4096), *range(27000, 45000, 4096)], "three panels, and two"
    with pytest.raises(RuntimeError, match="unit is 0"):
        LIBRARY.first_touch(memory, 0)
