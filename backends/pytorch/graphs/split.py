"""Prefill with a forward pass that is traced, cut at each attention, and compiled (SGLang's piecewise graphs).

    tokens -> [nodes] -> attend 0 -> [nodes] -> attend 1 -> … -> [nodes] -> hidden        2 · layers + 1 segments

The segments compute the same as the model, for any number of tokens. BreakableReplay captures them as graphs, and
attention runs between them with the rows of each step. The weights are inputs of the segments. Therefore most layers
have segments of the same kind, which is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ....kernels.ops import Ops, linear
from ....kernels.ops.attention import Attend, Attention, Rows
from ....kernels.ops.kv import Append
from ....kernels.ops.layer import Layer
from ....kernels.ops.linear import weight_tensors
from ....kernels.ops.moe import ExpertWeights, Routed, Routing
from ....kernels.ops.projection import Product
from ....kernels.ops.scan import LayerStates, Scan
from ....kernels.ops.state import StateRows
from ....kernels.ops.step import Places
from ..inputs import Step
from ..kv import GroupedKV
from . import cutting, opaque
from .compiling import Compiled, Compiler
from .cutting import Segment
from .opaque import LatentSite, Model, ScanSite, Site, computing

EXAMPLE = (23, 5)  # tokens, and hidden states returned, of the traced step; no size of a model equals these numbers
FORMATS = ("dense", "int8", "int4", "int4_wide", "fp8", "mxfp4")

Forwards = Callable[[Step, Ops, Any], Tensor]  # the signature of runner.Model.__call__
Call = Callable[..., tuple[Tensor, ...]]


class SplitModel:
    """A model in segments, traced from `model` (see runner.Model). `call` is Recorder.call.

    If the compiler fuses kernels, the reference ops are traced, otherwise the device's ops.
    """

    @torch.inference_mode()
    def __init__(self, model: Forwards, kv: GroupedKV, ops: Ops, compiler: Compiler, call: Call) -> None:
        self.compiler = compiler
        self._call = call
        tracing = _Tracing(Ops() if compiler.fuses else ops, kv)
        self._graph = cutting.traced(tracing.forward(model), *tracing.example())
        self._model = Model(tracing.products, ops, tracing.experts)
        nodes = self._graph.graph.nodes
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        self._constants = {node: getattr(self._graph, str(node.target)) for node in nodes if node.op == "get_attr"}
        (output,) = (node for node in nodes if node.op == "output")
        (self._hidden,) = output.all_input_nodes
        self.segments: list[tuple[Segment, Compiled | Site | LatentSite | ScanSite]] = []
        for segment in cutting.cut(self._graph, _is_cut, _output):
            work = compiler.compiled(segment) if segment.op is None else tracing.sites[_site(segment.op)]
            self.segments.append((segment, work))

    def __call__(self, step: Step, ops: Ops, kv: GroupedKV) -> Tensor:
        """Hidden states [samples, hidden]. Keys and values go to the cache of the traced model, not to `kv`."""
        samples = len(step.last)
        # Inductor would compile again for a dimension of size 1, so pad; and for inputs that are aligned differently,
        # so clone.
        last = F.pad(step.last, (0, max(0, 2 - samples)))
        inputs = step.tokens.clone(), step.positions.clone(), last
        values = self._constants | dict(zip(self._inputs, inputs, strict=True))
        outputs: tuple[Tensor, ...]
        for segment, work in self.segments:
            read = [values[node] for node in segment.inputs]
            if isinstance(work, Site | LatentSite):
                qkv, cos, sin = read
                places = step.places[work.group]
                outputs = (work.attend(qkv, cos, sin, ops, places.slots, places.rows).contiguous(),)
            elif isinstance(work, ScanSite):
                result = step.run_scan(work.scan, tuple(read), ops, step.state_rows, work.states)
                outputs = (result.contiguous(),)
            else:
                outputs = self._call(partial(self.computed, work), *read)
            values.update(zip(segment.outputs, outputs, strict=True))
            del read, outputs  # so that only `values` refers to the tensors of segment.spent
            for node in segment.spent:
                del values[node]
        hidden: Tensor = values[self._hidden]
        return hidden[:samples]

    @property
    def late(self) -> int:
        """See runner.Split."""
        return self.compiler.late

    def computed(self, segment: Compiled, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs of one compiled segment."""
        with computing(self._model):
            return segment(*inputs)


def _is_cut(node: fx.Node) -> bool:
    return node.target in (opaque.attend, opaque.scan)


def _output(cut: fx.Node) -> fx.Node:
    out = cut.args[-2]
    assert isinstance(out, fx.Node)
    return out


def _site(cut: fx.Node) -> int:
    site = cut.args[-1]
    assert isinstance(site, int)
    return site


def _route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Routed:
    return Routed(*opaque.route(logits, correction, *routing))


class _Tracing:
    """The ops of a trace. They store the arguments that the opaque ops need when the traced graph runs."""

    def __init__(self, ops: Ops, kv: GroupedKV) -> None:
        self._device = kv.cache.layers[0][0].device
        self._groups = len(kv.groups)
        self.cache = kv.cache  # the only field of GroupedKV that the model reads; page views would be fake tensors
        self.sites: list[Site | LatentSite | ScanSite] = []
        self.products: dict[int, Product] = {}
        self.experts: dict[int, ExpertWeights] = {}
        self._append_arguments: tuple[Any, ...] = ()
        self._ops = replace(
            ops,
            kv=replace(ops.kv, append=self._append, append_latent=self._append_latent),
            attention=Attention(paged=self._attend, latent=self._attend_latent),
            linear=replace(ops.linear, **{name: self._product(name) for name in FORMATS}),
            moe=replace(ops.moe, route=_route, experts=self._experts),
            layer=Layer(),
        )

    def example(self) -> tuple[Tensor, ...]:
        """Arguments of the traced forward pass: tokens, positions and last."""
        tokens, samples = EXAMPLE
        return tuple(torch.zeros(size, dtype=torch.int32, device=self._device) for size in (tokens, tokens, samples))

    def forward(self, model: Forwards) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """`model` as a function of tokens, positions and last: the fields of Step that tracing reads."""
        empty = torch.empty(0, dtype=torch.int32, device=self._device)
        rows = Rows(empty, empty, empty.view(0, 0), (), ())
        others = tuple(Places(replace(rows, group=group), empty) for group in range(1, self._groups))

        def forward(tokens: Tensor, positions: Tensor, last: Tensor) -> Tensor:
            step = Step(tokens, positions, empty, last, rows, other_places=others, run_scan=self._scan)
            return model(step, self._ops, self)

        return forward

    def _append(self, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, target: Append) -> Tensor:
        """Store the arguments. The next attention op includes this append."""
        self._append_arguments = qkv, cos, sin, target
        return target.queries(qkv)

    def _attend(self, query: Tensor, rows: Rows, attend: Attend) -> Tensor:
        *tensors, target = self._append_arguments
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        opaque.attend(*tensors, out, len(self.sites))
        self.sites.append(Site(target, attend, rows.group))
        return out

    def _scan(
        self, scan: Scan, inputs: tuple[Tensor, ...], _: Ops, rows: StateRows | None, states: tuple[LayerStates, ...]
    ) -> Tensor:
        out = inputs[0].new_empty(inputs[0].shape[0], scan.width)
        opaque.scan(list(inputs), out, len(self.sites))
        self.sites.append(ScanSite(scan, states))
        return out

    def _append_latent(self, heads: Tensor, *others: Any) -> Tensor:
        """Store the arguments. The next attention op includes this append."""
        self._append_arguments = heads, *others
        return heads.narrow(1, 0, heads.shape[1] - 1)

    def _attend_latent(self, query: Tensor, pages: tuple[Tensor, ...], rows: Rows, scale: float, start: int) -> Tensor:
        heads, cos, sin, rotation, _, _ = self._append_arguments
        tokens, query_heads, dim = query.shape
        out = query.new_empty(tokens, query_heads, dim - start)
        opaque.attend(heads, cos, sin, out, len(self.sites))
        self.sites.append(LatentSite(rotation, pages, scale, start))
        return out

    def _experts(self, x: Tensor, routed: Routed, weights: ExpertWeights) -> Tensor:
        first = weight_tensors(weights.gate_up)[0]
        self.experts[first.data_ptr()] = weights
        output: Tensor = opaque.experts(x, *routed, first)
        return output

    def _product(self, name: str) -> Callable[..., Tensor]:
        """The product of a weight format. Plain weights are multiplied by torch, packed weights by the opaque op."""

        def product(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
            if isinstance(weight, Tensor):
                return linear.dense(x, weight, bias, dtype)
            first = weight_tensors(weight)[0]
            self.products[first.data_ptr()] = Product(name, weight, bias)
            out_features = weight.out_features if hasattr(weight, "out_features") else len(first)
            output: Tensor = opaque.product(x, first, out_features, dtype or x.dtype)
            return output

        return product
