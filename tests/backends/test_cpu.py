"""The CPU backend: the conformance suite, and the probe of the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from localllm.backends import cpu, machine
from localllm.backends.cpu import device as cpu_device
from localllm.backends.cpu.device import device_for
from localllm.engine.errors import ModelRefused, RunnerFailed
from localllm.engine.files.model_files import read_model
from localllm.engine.lora import Adapter
from localllm.engine.options import LoadOptions
from localllm.engine.runner import DeviceInfo, RunnerSpec, page_bytes

from . import canary
from .batches import Row, Solo, make_batch
from .conformance import BUDGET, Conformance

XEON = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu avx2 avx512f avx512_bf16 avx512_vnni amx_bf16 amx_tile amx_int8
"""


class TestCpu(Conformance):
    backend = "cpu"

    def test_cache_size_follows_the_options(self, spec: RunnerSpec) -> None:
        [group] = spec.groups
        assert spec.cache_bytes == group.num_pages * page_bytes(group.page_size, 1, 64, 1, 4) == BUDGET.cache_bytes


def test_probe_imports_no_torch() -> None:
    code = """
import sys
from types import SimpleNamespace
from localllm.backends import cpu
print(cpu.probe())
assert cpu.accepts(SimpleNamespace(gguf=(), config=SimpleNamespace(model_type="llama", quantization=None))) == ""
for other in ("mamba", "kimi_linear", "bloom"):
    files = SimpleNamespace(gguf=(), config=SimpleNamespace(model_type=other, quantization=None))
    assert f"transformers' code of {other} is not supported: " in cpu.accepts(files)
assert not {"torch", "transformers"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("DeviceInfo(backend='cpu'")


def test_probe_describes_the_machine(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(XEON)
    assert machine.cpu_name(cpuinfo) == "Intel(R) Xeon(R) Platinum 8480+"
    flags = machine.cpu_flags(cpuinfo)
    assert {title for title, has in machine.features(flags).items() if has == "yes"} == {
        "AMX",
        "AMX BF16",
        "AMX INT8",
        "AVX-512",
        "AVX-512 BF16",
        "AVX-512 VNNI",
        "AVX2",
    }
    assert machine.features(frozenset({"asimd", "bf16"})) == {
        "NEON": "yes",
        "SVE": "no",
        "Arm BF16": "yes",
        "Arm I8MM": "no",
    }
    assert machine.cpu_flags(tmp_path / "absent") == frozenset()
    actual = cpu.probe()
    assert isinstance(actual, DeviceInfo)
    assert 0 < actual.free <= actual.memory
    assert int(actual.features["threads"].split(",")[0]) >= 1
    assert actual.features["kernels"].split(",")[0] in {*machine.VARIANTS, "none"}


@pytest.mark.parametrize(("physical", "allowed", "cores"), [(4, 8, 4), (4, 2, 2), (None, 8, 1)])
def test_cores_counts_allowed_physical_cores(
    monkeypatch: pytest.MonkeyPatch, physical: int | None, allowed: int, cores: int
) -> None:
    monkeypatch.setattr(machine.psutil, "cpu_count", lambda logical=True: 8 if logical else physical)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(allowed)), raising=False)
    assert machine.cores() == cores


def test_memory_is_limited_by_the_container(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert machine.memory(tmp_path) == (1000000, 600000)
    (tmp_path / "memory.current").write_text("1000001\n")
    assert machine.memory(tmp_path) == (1000000, 0), "a lowered limit leaves nothing"
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory(tmp_path)[0] > 1000000


def test_container_memory_is_at_most_that_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = SimpleNamespace(total=1000, available=300)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: system)
    assert machine.memory(tmp_path) == (1000, 300)
    (tmp_path / "memory.max").write_text("800\n")
    assert machine.memory(tmp_path) == (1000, 300), "what is used is not known"
    (tmp_path / "memory.current").write_text("100\n")
    assert machine.memory(tmp_path) == (800, 300)
    (tmp_path / "memory.max").write_text("2000\n")
    assert machine.memory(tmp_path) == (1000, 300)


def test_dtype_is_the_fastest_correct_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {}
    for dtype in (torch.bfloat16, torch.float32):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        stored[dtype] = read_model(canary.save(folder, dtype))
    amx, plain = machine.VARIANTS["amx"], machine.VARIANTS["avx2"]
    monkeypatch.delenv("LOCALLLM_CPU_LANE", raising=False)
    monkeypatch.setattr("localllm.backends.cpu.device.MISSING", "")
    assert device_for(stored[torch.bfloat16], amx).dtype == torch.bfloat16
    assert device_for(stored[torch.bfloat16], plain).dtype == torch.float32
    assert device_for(stored[torch.float32], amx).dtype == torch.float32
    monkeypatch.setenv("LOCALLLM_CPU_LANE", "avx2")
    assert device_for(stored[torch.bfloat16], amx).dtype == torch.float32, "the ISA variant is forced"
    monkeypatch.setattr("localllm.backends.cpu.device.MISSING", "there are none")
    assert device_for(stored[torch.bfloat16], amx).dtype == torch.bfloat16, "torch uses what the processor has"


def test_variant_is_the_fastest_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCALLLM_CPU_LANE", raising=False)
    for name, needs in machine.VARIANTS.items():
        assert machine.variant(needs | {"sse2"}) == name
    assert machine.variant(machine.VARIANTS["amx"] - {"avx512_bf16"}) == "avx2"
    assert machine.variant(frozenset({"asimd", "bf16"})) == "generic"


@pytest.mark.skipif(bool(cpu_device.MISSING), reason=cpu_device.MISSING or "")
def test_variant_equals_the_choice_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCALLLM_CPU_LANE", raising=False)
    usable = torch.ops.localllm.variants().split()
    foreseen = machine.variant(machine.cpu_flags())
    assert foreseen == usable[-1] or foreseen == "amx", "the system may refuse the tiles"


@pytest.fixture(scope="module")
def canary_files(tmp_path_factory: pytest.TempPathFactory):
    return read_model(canary.save(tmp_path_factory.mktemp("canary")))


@pytest.mark.real
def test_canary_is_correct_in_bfloat16(canary_files) -> None:
    runner = cpu.open(canary_files, LoadOptions(cache_bytes=2**20, max_rows=4, threads=1, dtype="bfloat16"))
    prompt = canary.prompt(4, 30, seed=0)
    assert Solo(runner, range(1, 20)).generate(prompt, 200) == canary.walk(prompt, 200)


def test_failed_step_raises_runner_failed(canary_files) -> None:
    runner = cpu.open(canary_files, LoadOptions(cache_bytes=2**20, max_rows=4, threads=1))
    with pytest.raises(RunnerFailed, match="the step failed"):
        runner.run(make_batch([Row([canary.VOCAB + 5], 0, [1])], canary.VOCAB)).result()


def test_adapters_are_refused_by_name(canary_files) -> None:
    runner = cpu.open(canary_files, LoadOptions(cache_bytes=2**20, max_rows=4, threads=1))
    with pytest.raises(ModelRefused, match="adapter poet"):
        runner.prepare_adapter(Adapter("poet", "/nowhere", "1"))


def test_number_of_threads_comes_from_the_options(canary_files) -> None:
    cpu.open(canary_files, LoadOptions(cache_bytes=2**20, max_rows=4, threads=1)).close()
    assert torch.get_num_threads() == 1


@pytest.mark.skipif(bool(cpu_device.MISSING), reason=cpu_device.MISSING or "")
def test_torch_uses_one_thread_with_kernels(canary_files) -> None:
    before = torch.ops.localllm.threads()
    try:
        cpu.open(canary_files, LoadOptions(cache_bytes=2**20, max_rows=4, threads=2)).close()
        assert (torch.ops.localllm.threads(), torch.get_num_threads()) == (2, 1)
    finally:
        torch.ops.localllm.use_threads(before)


def test_requested_threads_are_used_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_device, "MISSING", "not built")
    assert cpu_device._use_threads(3) == 3
    assert cpu_device._use_threads(None) == machine.cores()
