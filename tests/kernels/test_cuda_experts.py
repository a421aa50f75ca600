"""Decoder layers with experts and fused norms against their unfused parts, for few tokens, on a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from localllm.kernels.ops import CASES, Ops
from localllm.kernels.ops.case import Case
from localllm.kernels.ops.layer import decoder
from localllm.kernels.ops.layer_cases import inputs
from localllm.kernels.ops.reference_check import (
    call_op,
    copy_to,
    device_arguments,
    mismatch,
    pack_value,
    reference_run,
)

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
CLEAR = [case for case in CASES if case.op == "layer.decoder" and "clear-experts" in str(case)]
WIDE: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dim": 64, "hidden": 512, "inner": 192, "page_size": 16}


@pytest.mark.parametrize("experts", [6, 128])
@pytest.mark.parametrize("rows", [1, 3, 8])
@torch.inference_mode()
def test_fused_layer_equals_its_parts(rows: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.backends.cuda.ops import MISSING, OPS

    if MISSING:
        pytest.skip(MISSING)
    from localllm.kernels.cuda import layer

    fused = []
    norm_route = layer.norm_route
    monkeypatch.setattr(layer, "norm_route", lambda *given: fused.append(norm_route(*given)) or fused[-1])
    make = inputs([(1, 9 + row) for row in range(rows)], experts=experts, **WIDE)
    given = dict(make(torch.Generator().manual_seed(4), torch.bfloat16))
    given["layer"] = pack_value(OPS, copy_to(given["layer"], "cuda"), torch.bfloat16)
    given["ops"] = OPS

    def computed(decode: Any) -> tuple[Tensor, Tensor]:
        there = {name: copy_to(given[name], "cuda") for name in ("x", "stream", "step")}
        x, stream = decode(**given | there)
        return x.float(), stream.float()

    for one, other in zip(computed(layer.decoder), computed(decoder), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=4e-2 * other.abs().max().item())
    assert len(fused) == 1
    assert fused[0] is not None


@pytest.mark.parametrize("case", CLEAR, ids=map(str, CLEAR))
def test_layers_equal_the_reference(case: Case) -> None:
    from localllm.backends.cuda.ops import OPS

    arguments, expected = reference_run(case, Ops().layer.decoder, torch.bfloat16)
    there = device_arguments(case, OPS, arguments, "cuda", torch.bfloat16)
    assert not mismatch(call_op(case, OPS.layer.decoder, there), expected, case.tolerances[torch.bfloat16])
