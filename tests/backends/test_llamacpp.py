"""The llama.cpp backend on the CPU. The same library computes on GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from localllm import backends
from localllm.engine.adapterfiles import read_adapter
from localllm.engine.lora import Adapter
from localllm.engine.modelfiles import read_model
from localllm.engine.runner import Runner

from . import canary
from .conformance import BUDGET, Conformance
from .gguf_models import write_canary, write_canary_adapter

pytestmark = pytest.mark.real


@pytest.mark.real
class TestLlamacpp(Conformance):
    backend = "llamacpp"
    carries = False
    same_bits = False

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, tmp_path_factory: pytest.TempPathFactory) -> Runner:
        module = backends.load(cls.backend)
        return module.open(read_model(write_canary(tmp_path_factory.mktemp("canary"))), BUDGET)

    @pytest.fixture(scope="class")
    @classmethod
    def adapters(cls, runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
        """Adapters of the canary model with the shifts 1, 2, 3, 4."""
        root = tmp_path_factory.mktemp("adapters")
        files = [write_canary_adapter(root / f"{shift}.gguf", shift) for shift in range(1, canary.KEYS)]
        return [Adapter(file.stem, str(file), read_adapter(file).version) for file in files]
