"""The conformance suite over the fake NPU."""

from __future__ import annotations

import pytest

from localllm.backends import npu
from localllm.engine.files.model_files import read_model
from localllm.engine.runner import Runner

from ..backends import canary
from ..backends.conformance import BUDGET, Conformance

pytestmark = pytest.mark.emulated


class TestNpu(Conformance):
    backend = "npu"

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, tmp_path_factory: pytest.TempPathFactory) -> Runner:
        return npu.open(read_model(canary.save(tmp_path_factory.mktemp("canary"))), BUDGET)
