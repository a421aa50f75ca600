"""Traces a forward pass as a graph of torch ops and cuts it into segments that can be compiled and captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ....engine.errors import SettingRefused

Graph = fx.GraphModule


@dataclass(frozen=True, slots=True)
class Segment:
    """The nodes of a graph between two cuts, or the op at a cut."""

    inputs: tuple[fx.Node, ...]  # values that the segment reads
    outputs: tuple[fx.Node, ...]  # values that later segments read
    spent: tuple[fx.Node, ...]  # values that no later segment reads
    op: fx.Node | None  # the op at a cut; None: nodes between two cuts
    graph: Graph | None  # the nodes as a function of the inputs that returns a tuple of the outputs; None at a cut
    kind: str = ""  # a key that is equal for segments with equal code, input dtypes and input shapes

    def dynamic_sizes(self) -> list[tuple[int, int]]:
        """The dynamic sizes of the inputs, as (index of the input, dimension)."""
        sizes = []
        for index, node in enumerate(self.inputs):
            shape = node.meta["val"].shape if "val" in node.meta else ()
            sizes += [(index, dim) for dim, size in enumerate(shape) if isinstance(size, torch.SymInt)]
        return sizes


def traced(forward: Callable[..., Tensor], *examples: Tensor) -> Graph:
    """`forward` as a graph for inputs of any lengths. `examples` are one-dimensional inputs. If two examples have equal
    lengths, these two inputs must have equal lengths in every call.

    Raises SettingRefused if Python code of the model reads a length: the graph would be valid for that length only.
    """
    graph = make_fx(forward, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*examples)
    shapes: Any = graph.shape_env
    if shapes.replacements:
        raise _specialised(shapes)
    graph.graph.eliminate_dead_code()
    return graph


def _specialised(shapes: Any) -> SettingRefused:
    """The error for a graph that is valid only for the lengths of its examples; `shapes` is its ShapeEnv."""
    lengths = ", ".join(map(str, shapes.replacements.values()))
    frames = [guard.sloc.framework_loc for guard in shapes.guards]
    places = {f"{Path(frame.filename).name}, line {frame.lineno}" for frame in frames if frame}
    reason = f", because of {'; '.join(sorted(places))}" if places else ""
    return SettingRefused(
        f"graphs split: the model supports only {lengths} tokens{reason}",
        "set graphs to breakable, full or off",
        setting="graphs",
    )


def cut(graph: Graph, is_cut: Callable[[fx.Node], bool], writes: Callable[[fx.Node], fx.Node]) -> list[Segment]:
    """The segments of the graph in order: the nodes before the first cut, the op at this cut, the nodes after it, …

    `writes` returns, for the op at a cut, the node of the tensor that it writes to. No segment allocates this tensor:
    the implementation of the op returns its output."""
    nodes = graph.graph.nodes
    cuts = frozenset(node for node in nodes if is_cut(node))
    written = frozenset(map(writes, cuts))
    groups = _groups(nodes, cuts, written)
    inputs = [_inputs(group, cuts, written) for group in groups]
    (output,) = graph.graph.find_nodes(op="output")
    last_reader = {}
    for index, values in enumerate([*inputs, output.all_input_nodes]):
        last_reader.update(dict.fromkeys(values, index))
    segments = []
    for index, group in enumerate(groups):
        read = tuple(inputs[index])
        spent = tuple(node for node, last in last_reader.items() if last == index)
        if not cuts.isdisjoint(group):
            (op,) = group
            segments.append(Segment(read, (writes(op),), spent, op, None))
        else:
            outputs = tuple(node for node in group if last_reader.get(node, -1) > index)
            subgraph = _subgraph(group, read, outputs)
            segments.append(Segment(read, outputs, spent, None, subgraph, _kind(subgraph, read)))
    return segments


def _groups(nodes: Iterable[fx.Node], cuts: frozenset[fx.Node], written: frozenset[fx.Node]) -> list[list[fx.Node]]:
    """The nodes that compute values, in order: the nodes before the first cut, the cut, the nodes after it, …"""
    groups: list[list[fx.Node]] = [[]]
    for node in nodes:
        if node in cuts:
            groups += [[node], []]
        elif node.op == "call_function" and node not in written and not _is_size(node):
            groups[-1].append(node)
    return groups


def _inputs(group: Sequence[fx.Node], cuts: frozenset[fx.Node], written: frozenset[fx.Node]) -> list[fx.Node]:
    """Values that the group reads but does not compute, in the order of first use. An op at a cut does not read the
    tensor that it writes."""
    values = dict.fromkeys(value for node in group for value in _values(node))
    excluded = set(group)
    if not cuts.isdisjoint(group):
        excluded |= written
    return [value for value in values if value not in excluded]


def _values(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that a node reads. If an argument is a size, the tensors from which the size is computed."""
    for argument in node.all_input_nodes:
        if _is_size(argument):
            yield from _values(argument)
        else:
            yield argument


def _is_size(node: fx.Node) -> bool:
    """Whether the node is a number computed from the lengths of the inputs. Every segment computes its sizes itself."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, torch.SymFloat))


def _subgraph(group: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Graph:
    """A graph of the group's nodes: a function of `inputs` that returns `outputs` as a tuple."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"input_{index}") for index, node in enumerate(inputs)}

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:  # `node` is a size, or the group's next node
            args = fx.map_arg(node.args, copy)
            kwargs = fx.map_arg(node.kwargs, copy)
            copies[node] = graph.create_node("call_function", node.target, args, kwargs)
        return copies[node]

    for node in group:
        copy(node)
    graph.output(tuple(copies[node] for node in outputs))
    graph.eliminate_dead_code()
    return fx.GraphModule(torch.nn.Module(), graph)


def _kind(subgraph: Graph, inputs: Sequence[fx.Node]) -> str:
    values = [node.meta["val"] for node in inputs if node.meta.get("val") is not None]
    types = [(value.dtype, tuple(value.shape), value.stride()) for value in values]
    return f"{subgraph.code}\n{types}"
