"""The NPU runner over the fake ACL: the conformance suite with all forms of graphs and of attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from localllm.backends.npu.device import device
from localllm.backends.npu.installation import start
from localllm.backends.pytorch.graphs.runner import GraphRunner
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.runner import Runner, page_bytes

from ..backends import canary
from ..backends.conformance import BUDGET, PAGE, Conformance

NPU_PAGE = 128
NPU_BUDGET = LoadOptions(
    context=8 * NPU_PAGE,
    cache_bytes=60 * page_bytes(NPU_PAGE, 1, 64, 1, 2),
    max_rows=12,
    max_step_tokens=256,
    threads=1,
)


class OnNpu(Conformance):
    """A subclass sets the options. Pages of 128 tokens: attention has kernels for these only."""

    backend = "npu"
    page = NPU_PAGE
    same_bits = False
    options = NPU_BUDGET
    kind: type = GraphRunner

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, tmp_path_factory: pytest.TempPathFactory) -> Runner:
        start()
        files = read_model(canary.save(tmp_path_factory.mktemp("canary"), torch.bfloat16, context=8 * NPU_PAGE))
        runner = open_runner(files, cls.options, device(), 2**30)
        assert isinstance(runner, cls.kind)
        return runner


@pytest.mark.emulated
class TestWithoutGraphs(OnNpu):
    options = replace(NPU_BUDGET, graphs="off")
    kind = TorchRunner


@pytest.mark.emulated
class TestFullGraphs(OnNpu):
    options = replace(NPU_BUDGET, graphs="full")


@pytest.mark.emulated
class TestBreakableGraphs(OnNpu):
    options = replace(NPU_BUDGET, graphs="breakable")


@pytest.mark.emulated
class TestSplitGraphs(OnNpu):
    options = replace(NPU_BUDGET, graphs="split", compiler="eager")


@pytest.mark.emulated
class TestRaggedAttention(OnNpu):
    options = replace(NPU_BUDGET, attention="ragged")


@pytest.mark.emulated
class TestAttentionOverPages(OnNpu):
    options = replace(NPU_BUDGET, attention="pages")


@pytest.mark.emulated
class TestFirstFusedAttention(OnNpu):
    options = replace(NPU_BUDGET, attention="fused_v1")


@pytest.mark.emulated
class TestInt8Cache(OnNpu):
    options = replace(NPU_BUDGET, cache_dtype="int8")


@pytest.mark.emulated
class TestReferences(OnNpu):
    """Small pages, which only the reference of attention computes."""

    page = PAGE
    options = replace(BUDGET, ops=("all=reference",))
