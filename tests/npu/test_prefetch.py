"""Weight prefetch on the fake NPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from localllm.backends.npu.device import open_on_npu
from localllm.backends.npu.installation import start
from localllm.engine.files.model_files import read_model
from localllm.engine.options import Graphs, LoadOptions

from ..backends.batches import Row, make_batch
from ..backends.tiny import TINIES, VOCAB
from . import kernels

pytestmark = pytest.mark.emulated


def test_npu_accepts_the_call() -> None:
    weight = torch.zeros(16, 4, device="npu")
    torch.ops.npu.npu_prefetch(weight, torch.zeros(1, 4, device="npu"), 256, 0)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("graphs", ["off", "full"])
def test_model_with_prefetch_decodes_the_same_tokens(graphs: Graphs, tmp_path: Path) -> None:
    """The option of the user, also in captured steps."""
    start()
    next(tiny for tiny in TINIES if tiny.label == "llama").save(tmp_path)
    files = read_model(tmp_path)
    options = LoadOptions(cache_bytes=2**21, max_rows=1, max_step_tokens=16, threads=1, graphs=graphs)
    tokens = []
    for value in ("off", "on"):
        before = kernels.calls["npu::npu_prefetch"]
        runner = open_on_npu(files, replace(options, prefetch=value))
        rows = [Row([5, 9, 77, 3], 0, [1]), Row([7], 4, [1]), Row([8], 5, [1])]
        tokens.append([runner.run(make_batch([row], VOCAB)).result().tokens.tolist() for row in rows])
        assert (kernels.calls["npu::npu_prefetch"] > before) == (value == "on")
    assert tokens[0] == tokens[1]
