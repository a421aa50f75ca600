"""The llama.cpp backend on the CPU. The same library computes on GPUs."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from localllm import backends
from localllm.backends.llamacpp.architectures import is_known
from localllm.engine.files.adapter_files import read_adapter
from localllm.engine.files.model_files import read_model
from localllm.engine.lora import Adapter
from localllm.engine.runner import Runner

from . import canary
from .conformance import BUDGET, Conformance, Conversation, check_crowd, crowd
from .gguf_models import write_canary, write_canary_adapter
from .gguf_random import ARCHITECTURES

pytestmark = pytest.mark.real


@pytest.mark.real
class TestLlamacpp(Conformance):
    backend = "llamacpp"
    same_bits = False
    options = BUDGET

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, tmp_path_factory: pytest.TempPathFactory) -> Runner:
        module = backends.load(cls.backend)
        return module.open(read_model(write_canary(tmp_path_factory.mktemp("canary"))), cls.options)

    @pytest.fixture(scope="class")
    @classmethod
    def adapters(cls, runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
        """Adapters of the canary model with the shifts 1, 2, 3, 4."""
        root = tmp_path_factory.mktemp("adapters")
        files = [write_canary_adapter(root / f"{shift}.gguf", shift) for shift in range(1, canary.KEYS)]
        return [Adapter(file.stem, str(file), read_adapter(file).version) for file in files]


@pytest.mark.real
class TestLlamacppWithACacheForEachRow(TestLlamacpp):
    options = replace(BUDGET, cache_bytes=None, cache_layout="rows")


@pytest.mark.parametrize("rows", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_crowd(tmp_path: Path, rows: int) -> None:
    options = replace(crowd(rows), cache_dtype="f32")  # the memory is as short as with other backends
    opened = backends.load("llamacpp").open(read_model(write_canary(tmp_path)), options)
    check_crowd(opened, rows)
    opened.close()


def test_shards_are_one_model(tmp_path: Path) -> None:
    files = read_model(write_canary(tmp_path, shard_tensors=4))
    assert len(files.gguf) == 3
    opened = backends.load("llamacpp").open(files, BUDGET)
    talk = Conversation(opened)
    prompt = canary.prompt(1, 40, seed=1)
    talk.submit("a", prompt, 30)
    assert talk.finish() == {"a": canary.walk(prompt, 30)}
    opened.close()


def test_end_of_the_process_is_logged() -> None:
    """A failed assertion in llama.cpp ends the process. The reason is in the log of the worker."""
    code = """
import logging
from localllm.backends.llamacpp.library import library
logging.basicConfig()
library()._log(3, b"a warning\\n", None)
library()._log(4, b"f: CUDA error: no memory\\n", None)
library().c._lib.ggml_abort(b"ggml.c", 7, b"GGML_ASSERT(%s) failed", b"x > 0")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert ended.returncode == -signal.SIGABRT
    reason = "ggml.c:7: GGML_ASSERT(x > 0) failed; CUDA error: no memory"
    assert f"llama.cpp ends the process: {reason}\n" in ended.stderr


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("c++"), reason="needs Linux and a C++ compiler")
def test_library_with_a_copy_of_the_cpp_library_uses_that_of_the_process(tmp_path: Path) -> None:
    """Some builds of llama.cpp have such copies. With two C++ libraries in the process, string streams crash."""
    source = tmp_path / "copy.cpp"
    source.write_text('#include <iostream>\nextern "C" const void * stream() { return &std::cout; }\n')
    built = tmp_path / "copy.so"
    subprocess.run(["c++", "-shared", "-fPIC", "-static-libstdc++", source, "-o", built], check=True)
    code = f"""
import ctypes
import numpy  # loads the C++ library for itself
from localllm.backends.llamacpp.library import library
library()
stream = ctypes.CDLL({str(built)!r}).stream
stream.restype = ctypes.c_void_p
assert stream() == ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL("libstdc++.so.6"), "_ZSt4cout"))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_architectures_that_llama_cpp_knows(caplog: pytest.LogCaptureFixture) -> None:
    assert all(map(is_known, ARCHITECTURES))
    assert not any(map(is_known, ("llama99", "Llama", "", "a'b", "x" * 300)))
    assert not caplog.records, "the question is no error of a model"


def test_read_only_disk_is_no_unknown_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    assert is_known.__wrapped__("llama98")
