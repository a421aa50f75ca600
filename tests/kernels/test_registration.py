"""Every op of the library as torch registers it: schema, fakes and tracing agree, and bad arguments are refused.

The arguments are those that the wrappers pass for the cases of kernels/ops.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from localllm.backends.cpu.device import DEVICE
from localllm.kernels.ops.cases import CASES
from localllm.kernels.ops.cases.reference_check import call_op, pack_value

from .opchecked import copied

cpu = pytest.importorskip("localllm.kernels.cpu", reason="the library is not built", exc_type=ImportError)

pytestmark = pytest.mark.real
OPS = sorted(
    {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "localllm::" in name}
)
WITHOUT_TENSORS = {"variants", "use_variant", "threads", "use_threads", "share_from", "packed_bytes"}
WRITING = [name for name in OPS if name not in WITHOUT_TENSORS]
EXAMPLES = 3  # of each op, of different kinds


class Recorder(TorchDispatchMode):
    """Stores copies of the arguments of the library's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple[Any, ...]]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "localllm":
            self.calls[func._schema.name.split("::")[1]].append(copied(args))
        return func(*args, **(kwargs or {}))


@cache
def recorded() -> dict[str, list[tuple[Any, ...]]]:
    with Recorder() as recorder:
        for case in CASES:
            dtype = torch.bfloat16 if torch.bfloat16 in case.tolerances else torch.float32
            given = dict(case.make(torch.Generator().manual_seed(3), dtype))
            given |= {name: pack_value(DEVICE.ops, given[name], dtype) for name in case.packs}
            if "ops" in given:
                given["ops"] = DEVICE.ops
            call_op(case, dict(DEVICE.ops)[case.op], given)
    return recorder.calls


def examples(name: str) -> list[tuple[Any, ...]]:
    """Calls that differ in the arguments that are None and in the numbers."""
    kinds = {str([None if isinstance(one, torch.Tensor) else one for one in call]): call for call in recorded()[name]}
    return list(kinds.values())[:EXAMPLES]


def test_cases_reach_every_op() -> None:
    assert set(recorded()) >= set(WRITING)


@pytest.mark.parametrize("name", WRITING)
def test_schema_fake_and_tracing_agree(name: str) -> None:
    op = getattr(torch.ops.localllm, name).default
    for call in examples(name):
        torch.library.opcheck(op, copied(call))


@pytest.mark.parametrize("name", WRITING)
def test_ops_accept_tensors_without_data(name: str) -> None:
    """The fake exists: opcheck does not notice a missing one, because torch creates a fake for an op without
    outputs."""
    for call in examples(name):
        getattr(torch.ops.localllm, name).default(
            *tree_map(lambda one: one.to("meta") if isinstance(one, torch.Tensor) else one, call)
        )


@pytest.mark.parametrize("name", WRITING)
def test_compiles_into_one_graph(name: str) -> None:
    """aot_eager traces, removes mutation and restores it, as inductor does, without a C++ compiler."""
    op = getattr(torch.ops.localllm, name).default
    for call in examples(name)[:1]:
        expected, found = copied(call), copied(call)
        op(*expected)
        torch._dynamo.reset()
        torch.compile(lambda *arguments, op=op: op(*arguments), backend="aot_eager", fullgraph=True)(*found)
        tree_map(
            lambda one, other: (
                torch.testing.assert_close(one, other, equal_nan=True) if isinstance(one, torch.Tensor) else None
            ),
            found,
            expected,
        )


F = torch.empty
TOKENS = torch.zeros(2, dtype=torch.int64)


def attention_with(**changed: Any) -> dict[str, Any]:
    """Two rows in pages of four positions: one token after two, and two tokens."""
    ints = {"row_starts": [0, 1, 3], "context_lens": [3, 2], "page_table": [[1], [2]]}
    given: dict[str, Any] = {
        "out": torch.zeros(3, 4, 8),
        "query": torch.zeros(3, 4, 8),
        "key_pages": torch.zeros(3, 4, 2, 8),
        "value_pages": torch.zeros(3, 4, 2, 8),
        **{name: torch.tensor(value, dtype=torch.int32) for name, value in ints.items()},
        "sinks": None,
        "scale": 1.0,
        "window": 0,
        "soft_cap": 0.0,
    }
    for name, value in changed.items():
        given[name] = torch.tensor(value, dtype=torch.int32) if isinstance(value, list) else value
    return given


def latent_with(**changed: Any) -> dict[str, Any]:
    """The rows of attention_with, over latents of 6 dimensions after 2 rotated dimensions."""
    given = attention_with()
    rows = {name: given[name] for name in ("row_starts", "context_lens", "page_table")}
    given = {"out": torch.zeros(3, 4, 6), "query": torch.zeros(3, 4, 8), "pages": torch.zeros(3, 4, 1, 8), **rows}
    given |= {"scale": 1.0, "start": 2}
    for name, value in changed.items():
        given[name] = torch.tensor(value, dtype=torch.int32) if isinstance(value, list) else value
    return given


def linear_with(**changed: Any) -> dict[str, Any]:
    given = {"out": F(2, 5), "x": F(2, 8), "packed": F(8 * 32 * 4, dtype=torch.uint8), "bias": None}
    return given | {"format": 0, "in_features": 8, "group": 0, "wide": False} | changed


def experts_with(**changed: Any) -> dict[str, Any]:
    """Two tokens, three experts of hidden 64 and inner 32 in float32, top 2."""
    chosen = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32)
    weights = {"gate_up": F(3 * 64 * 64 * 4, dtype=torch.uint8), "down": F(3 * 64 * 32 * 4, dtype=torch.uint8)}
    given = {"out": F(2, 64), "x": F(2, 64), "chosen": chosen, "weights": F(2, 2), **weights}
    given |= {"gate_up_bias": None, "down_bias": None, "format": 0, "gate_up_group": 0, "down_group": 0}
    return given | {"wide": False, "experts": 3, "inner": 32, "gate": 0} | changed


def routed_experts_with(**changed: Any) -> dict[str, Any]:
    """The tokens and experts of `experts_with`, and their router."""
    rest = {name: one for name, one in experts_with().items() if name not in ("out", "x", "chosen", "weights")}
    given = {"out": F(2, 64), "x": F(2, 64), "router": F(32 * 64 * 4, dtype=torch.uint8), "router_bias": None}
    given |= {"router_format": 0, "router_group": 0, "correction": None, "score": 0, "renormalise": True}
    return given | {"scale": 1.0, "groups": 1, "top_groups": 1, "top2": False, "top_k": 2} | rest | changed


def layers_with(**changed: Any) -> dict[str, Any]:
    """A step of two layers, as the cases record it."""
    names = "x stream tensors numbers reals cos sin slots key_pages value_pages row_starts context_lens page_table"
    call = next(call for call in recorded()["layers"] if len(call[1]) > 1)
    return dict(zip(names.split(), copied(call), strict=True)) | changed


def test_layers_need_all_their_arguments() -> None:
    for name, kept in (("tensors", slice(-1)), ("numbers", slice(-1)), ("reals", slice(-1)), ("cos", slice(0))):
        given = layers_with()
        given[name] = given[name][kept]
        with pytest.raises(RuntimeError, match=f"{name}( is too short|, which has 0 tensors)"):
            torch.ops.localllm.layers(*given.values())
    torch.ops.localllm.layers(*layers_with().values())


def route_with(**changed: Any) -> dict[str, Any]:
    given = {"experts": torch.zeros(2, 3, dtype=torch.int32), "weights": F(2, 3), "logits": F(2, 8)}
    given |= {"correction": None, "score": 0, "renormalise": True, "scale": 1.0}
    return given | {"groups": 1, "top_groups": 1, "top2": False} | changed


def conv_with(**changed: Any) -> dict[str, Any]:
    """Two rows of 1 and 2 tokens, 6 channels, states in slots 4 and 0 of 5."""
    given = {"out": F(3, 6), "x": F(3, 6), **STATE_ROWS, "weight": F(4, 6), "bias": None, "states": F(5, 3, 6)}
    return given | {"gated": False} | changed


def delta_with(**changed: Any) -> dict[str, Any]:
    """The rows of conv_with, 4 heads of [8, 6] with 2 key heads."""
    given = {"out": F(3, 4, 6), "qkv": F(3, 56), "a": F(3, 4), "b": F(3, 4), **STATE_ROWS}
    return given | {"rates": F(4), "dt_bias": F(4), "states": F(5, 4, 8, 6)} | changed


def ssd_with(**changed: Any) -> dict[str, Any]:
    given = {"out": F(3, 4, 6), "x": F(3, 56), "dt": F(3, 4), **STATE_ROWS, "rates": F(4), "dt_bias": F(4)}
    return given | {"skip": F(4), "dt_min": 0.0, "dt_max": 1.0, "states": F(5, 4, 8, 6)} | changed


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


STATE_ROWS = {"row_starts": int32(0, 1, 3), "context_lens": int32(1, 9), "slots": int32(4, 0)}

REFUSED: list[tuple[str, dict[str, Any] | tuple[Any, ...], str]] = [
    ("rms_norm", (F(2, 8), F(2, 8), F(7), 1e-6, 0.0), "rms_norm: weight has shape [7], [8] expected"),
    ("rms_norm", (F(2, 8), F(8, 2).t(), F(8), 1e-6, 0.0), "x of shape [2, 8] has strides [1, 2]"),
    ("rms_norm", (F(1, 8).expand(2, 8), F(2, 8), F(8), 1e-6, 0.0), "out is an output, but its rows overlap"),
    ("rms_norm", (F(2, 8), F(2, 8).half(), F(8), 1e-6, 0.0), "out and x are of different types"),
    ("rms_norm", (F(2, 8).double(), F(2, 8).double(), F(8), 1e-6, 0.0), "is float64, float32, bfloat16 or float16"),
    ("gate", (F(2, 4), F(2, 8), 3), "gate: kind is 3, 0 to 2 expected"),
    ("gate", (F(2, 4), F(2, 7), 0), "gate: x has shape [2, 7], [2, 8] expected"),
    ("rope", (F(2, 1, 6), F(2, 4), F(2, 4), 0), "rope: cos rotates 8 dimensions, but heads have 6"),
    ("rope", (F(2, 1, 8), F(2, 4), F(2, 4), 2), "rope: rotation is 2, 0 to 1 expected"),
    ("store", (F(2, 1, 4), F(2, 1, 4), F(3, 2, 1, 4), F(3, 2, 1, 4), torch.tensor([5, 6])), "slots[1] is 6, 0 to 5"),
    ("store", (F(2, 1, 4), F(2, 1, 4), F(3, 2, 1, 4), F(3, 2, 1, 4), torch.tensor([-1, 0])), "slots[0] is -1, 0 to 5"),
    ("store", (F(2, 1, 4), F(2, 1, 4), F(3, 2, 1, 4), F(3, 2, 1, 4), TOKENS.int()), "slots is int32, int64 expected"),
    ("copy_pages", (F(3, 4), torch.tensor([0]), torch.tensor([3])), "copy_pages: targets[0] is 3, 0 to 2 expected"),
    ("embedding", (F(2, 4), torch.tensor([0, 9], dtype=torch.int32), F(9, 4), 1.0), "tokens[1] is 9, 0 to 8 expected"),
    ("attention", attention_with(page_table=[[1], [3]]), "page_table[1, 0] is 3, 0 to 2 expected"),
    ("attention", attention_with(page_table=[[-1], [2]]), "page_table[0, 0] is -1, 0 to 2 expected"),
    ("attention", attention_with(context_lens=[5, 2]), "context_lens[0] is 5, 1 (its new tokens) to 4 (positions in"),
    ("attention", attention_with(context_lens=[3, 1]), "context_lens[1] is 1, 2 (its new tokens) to 4 (positions in"),
    ("attention", attention_with(row_starts=[0, 1, 4]), "row_starts goes from 0 to 4, 0 to 3"),
    ("attention", attention_with(row_starts=[0, 4, 3]), "context_lens[0] is 3, 4 (its new tokens)"),
    ("attention", attention_with(query=F(3, 3, 8), out=F(3, 3, 8)), "query has 3 heads, a multiple of the 2 kv heads"),
    ("attention", attention_with(window=-1), "attention: window is -1, 0 to 2147483647 expected"),
    ("attention", attention_with(window=2**40), "attention: window is 1099511627776, 0 to 2147483647 expected"),
    ("attention", attention_with(soft_cap=-1.0), "soft_cap is -1, 0 (no cap) or more expected"),
    ("attention", attention_with(query=F(3, 0, 8), out=F(3, 0, 8)), "query has 0 heads, a multiple of the 2"),
    ("latent_attention", latent_with(page_table=[[1], [3]]), "page_table[1, 0] is 3, 0 to 2 expected"),
    ("latent_attention", latent_with(context_lens=[5, 2]), "context_lens[0] is 5, 1 (its new tokens)"),
    ("latent_attention", latent_with(start=8), "latent_attention: start is 8, 0 to 7 expected"),
    ("latent_attention", latent_with(start=-1), "latent_attention: start is -1, 0 to 7 expected"),
    ("latent_attention", latent_with(out=F(3, 4, 8)), "out has shape [3, 4, 8], [3, 4, 6] expected"),
    ("latent_attention", latent_with(out=F(3, 4, 6).half()), "latent_attention: out and query are of different types"),
    ("latent_attention", latent_with(pages=F(3, 4, 2, 8)), "pages has shape [3, 4, 2, 8], [any, any, 1, 8] expected"),
    ("latent_attention", latent_with(pages=F(3, 4, 1, 8).double()), "pages is float64, float32, bfloat16 or float16"),
    ("latent_attention", latent_with(pages=F(3, 0, 1, 8)), "latent_attention: the pages have page_size 0"),
    ("latent_attention", latent_with(query=F(3, 0, 8), out=F(3, 0, 6)), "query has 0 heads, a multiple of the 1"),
    ("linear", linear_with(packed=F(12, dtype=torch.uint8)), "linear: packed has 12 bytes, 1024 expected for float32"),
    ("linear", linear_with(x=F(2, 7)), "linear: x has shape [2, 7], [any, 8] expected"),
    ("linear", linear_with(format=7), "linear: format is 7, 0 to 6 expected"),
    ("linear", linear_with(format=6, group=32), "there are 8 inputs; mxfp4 needs groups of 32 inputs"),
    ("linear", linear_with(format=4, group=48), "linear: group is 48, a multiple of 32 expected"),
    ("linear", linear_with(format=4, group=0), "linear: group is 0, a multiple of 32 expected"),
    ("linear", linear_with(wide=True), "linear: wide is for int4 only"),
    ("linear", linear_with(bias=F(5).half()), "linear: bias is float16, float32 expected"),
    ("linear", linear_with(in_features=-1), "linear: in_features is -1, 0 to 2147483647 expected"),
    ("route", route_with(logits=F(2, 8).double()), "route: logits is float64, float32 expected"),
    ("route", route_with(logits=F(2, 2)), "route: the number of chosen experts is 3, 1 to 2 expected"),
    ("route", route_with(groups=3), "route: 8 experts are not divisible into 3 groups"),
    ("route", route_with(groups=4, top_groups=5), "route: top_groups is 5, 1 to 4 expected"),
    ("route", route_with(groups=4, top_groups=1), "route: the number of chosen experts is 3, 1 to 2 expected"),
    ("route", route_with(correction=F(7)), "route: correction has shape [7], [8] expected"),
    ("route", route_with(score=2), "route: score is 2, 0 to 1 expected"),
    ("experts", experts_with(chosen=torch.full((2, 2), 3, dtype=torch.int32)), "chosen[0] is 3, 0 to 2 expected"),
    ("experts", experts_with(chosen=torch.full((2, 2), -1, dtype=torch.int32)), "chosen[0] is -1, 0 to 2 expected"),
    ("experts", experts_with(weights=F(2, 3)), "experts: weights has shape [2, 3], [2, 2] expected"),
    ("experts", experts_with(inner=16), "experts: hidden 64 and inner 16, multiples of 32 expected"),
    ("experts", experts_with(out=F(2, 64).half()), "experts: out and x are of different types"),
    ("experts", experts_with(experts=4), "experts: packed has 49152 bytes, 65536 expected for float32"),
    ("experts", experts_with(down_bias=F(3, 32)), "experts: a bias has shape [3, 32], [3, 64] expected"),
    ("experts", experts_with(wide=True), "experts: wide is for int4 only"),
    ("experts", experts_with(gate=4), "experts: gate is 4, 0 to 3 expected"),
    ("routed_experts", routed_experts_with(router=F(8, dtype=torch.uint8)), "packed has 8 bytes, 8192 expected"),
    ("routed_experts", routed_experts_with(router_bias=F(4)), "router_bias has shape [4], [3] expected"),
    ("routed_experts", routed_experts_with(correction=F(4)), "correction has shape [4], [3] expected"),
    ("routed_experts", routed_experts_with(top_k=4), "the number of chosen experts is 4, 1 to 3 expected"),
    ("routed_experts", routed_experts_with(groups=2), "routed_experts: 3 experts are not divisible into 2 groups"),
    ("routed_experts", routed_experts_with(out=F(2, 64).half()), "routed_experts: out and x are of different types"),
    ("routed_experts", routed_experts_with(router_format=9), "router_format is 9"),
    ("pack", (F(1024, dtype=torch.uint8), F(5, 8), F(5), None, 0, 0), "pack: scales are for quantised weights only"),
    ("pack", (F(2304, dtype=torch.uint8), F(5, 8, dtype=torch.int8), None, None, 3, 0), "pack: scales are missing"),
    ("pack", (F(12, dtype=torch.uint8), F(5, 8), None, None, 0, 0), "pack: packed has 12 bytes, 1024 expected"),
    ("greedy", (TOKENS, F(3, 7)), "greedy: tokens has shape [2], [3] expected"),
    ("greedy", (TOKENS, F(2, 0)), "greedy: logits has 0 columns"),
    ("mask", (F(2, 33), TOKENS, F(2, 1, dtype=torch.int32)), "mask: words has shape [2, 1], [2, 2] expected"),
    ("mask", (F(2, 33), TOKENS + 2, F(2, 2, dtype=torch.int32)), "mask: rows[0] is 2, 0 to 1 expected"),
    ("logprob", (F(2), F(2), F(2, 7), TOKENS + 7), "logprob: tokens[0] is 7, 0 to 6 expected"),
    ("causal_conv", conv_with(slots=int32(5, 0)), "causal_conv: slots[0] is 5, -1 (none) to 4 expected"),
    ("causal_conv", conv_with(slots=int32(-2, 0)), "causal_conv: slots[0] is -2, -1 (none) to 4 expected"),
    ("causal_conv", conv_with(row_starts=int32(0, 1, 4)), "causal_conv: row_starts goes from 0 to 4, 0 to 3"),
    ("causal_conv", conv_with(row_starts=int32(0, 4, 3)), "causal_conv: row_starts goes down after row 1"),
    ("causal_conv", conv_with(weight=F(1, 6)), "causal_conv: weight has 1 rows, 2 to 8 expected"),
    ("causal_conv", conv_with(gated=True), "causal_conv: x has shape [3, 6], [any, 18] expected"),
    ("causal_conv", conv_with(states=F(5, 4, 6)), "causal_conv: states has shape [5, 4, 6], [any, 3, 6] expected"),
    ("causal_conv", conv_with(states=F(5, 3, 6).half()), "causal_conv: states is float16, float32 expected"),
    ("causal_conv", conv_with(bias=F(6).half()), "causal_conv: bias and weight are of different types"),
    ("gated_delta", delta_with(qkv=F(3, 55)), "gated_delta: x has 55 columns, which are no queries, keys and values"),
    ("gated_delta", delta_with(qkv=F(3, 72)), "gated_delta: x has 72 columns, which are no queries, keys and values"),
    ("gated_delta", delta_with(a=F(3, 4).half()), "gated_delta: a and x are of different types"),
    ("gated_delta", delta_with(slots=int32(0, 5)), "gated_delta: slots[1] is 5, -1 (none) to 4 expected"),
    ("gated_delta", delta_with(rates=F(3)), "gated_delta: rates has shape [3], [4] expected"),
    ("ssd", ssd_with(x=F(3, 24)), "ssd: x has 24 columns, which are no queries, keys and values for the 4 heads"),
    ("ssd", ssd_with(skip=F(4).half()), "ssd: skip is float16, float32 expected"),
    ("ssd", ssd_with(out=F(3, 4, 6).half()), "ssd: out and x are of different types"),
    ("gated_norm", (F(2, 3, 4), F(2, 3, 4), F(2, 3, 4), F(5), 1e-6, 0), "gated_norm: weight has shape [5], [4] expect"),
    ("gated_norm", (F(2, 3, 4), F(2, 3, 4), F(2, 3, 4), F(4), 1e-6, 2), "gated_norm: order is 2, 0 to 1 expected"),
    ("packed_bytes", (0, -1, 8, 0), "packed_bytes: out_features is -1, 0 to 2147483647 expected"),
    ("use_threads", (-1,), "use_threads: count is -1, 0 to 1024 expected"),
]


@pytest.mark.parametrize(
    ("name", "arguments", "says"), REFUSED, ids=[f"{name}-{n}" for n, (name, *_) in enumerate(REFUSED)]
)
def test_bad_arguments_are_refused_by_name(name: str, arguments: Any, says: str) -> None:
    op = getattr(torch.ops.localllm, name).default
    with pytest.raises(RuntimeError, match=re.escape(says)):
        op(**arguments) if isinstance(arguments, dict) else op(*arguments)
