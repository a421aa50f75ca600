"""Traces a forward pass as a graph of torch ops and cuts it into pieces that can be compiled and captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """A piece of a graph between two cuts, or the op at a cut, with the graph nodes that it reads and writes."""

    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    spent: tuple[fx.Node, ...]  # values that no later part reads
    op: fx.Node | None  # the op at a cut; None: a piece
    graph: Graph | None  # a piece: takes the inputs and returns a tuple of the outputs
    kind: str = ""  # pieces with equal code, input dtypes and shapes have equal kinds

    def changing(self) -> Iterator[tuple[int, int]]:
        """(input, dimension) of every dynamic size."""
        for at, node in enumerate(self.inputs):
            for dim, size in enumerate(node.meta["val"].shape if "val" in node.meta else ()):
                if isinstance(size, torch.SymInt):
                    yield at, dim


def traced(forward: Callable[..., Tensor], *examples: Tensor) -> Graph:
    """`forward` as a graph for inputs of any lengths. The examples are one-dimensional. Inputs whose examples have
    equal lengths must have equal lengths in every call.

    Raises SettingRefused if Python code of the model reads a length: the graph would be valid for that length only.
    """
    graph = make_fx(forward, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*examples)
    shapes: Any = graph.shape_env
    fixed = shapes.replacements
    if fixed:
        frames = [guard.sloc.framework_loc for guard in shapes.guards]
        places = {f"{Path(frame.filename).name}, line {frame.lineno}" for frame in frames if frame}
        lengths = ", ".join(map(str, fixed.values()))
        reason = f", because of {'; '.join(sorted(places))}" if places else ""
        raise SettingRefused(
            f"graphs split: the model supports only {lengths} tokens{reason}",
            "set graphs to breakable, full or off",
        )
    graph.graph.eliminate_dead_code()
    return graph


def cut(graph: Graph, is_cut: Callable[[fx.Node], bool], writes: Callable[[fx.Node], fx.Node]) -> list[Segment]:
    """The parts in order: a piece, the op at a cut, a piece, … `writes` gives the node of the tensor that the op at a
    cut writes to. No piece allocates this tensor: the implementation of the op returns its output."""
    written = {writes(node) for node in graph.graph.nodes if is_cut(node)}
    stretches: list[list[fx.Node]] = [[]]
    for node in graph.graph.nodes:
        if is_cut(node):
            stretches += [[node], []]
        elif node.op == "call_function" and node not in written and not _is_size(node):
            stretches[-1].append(node)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    reads = []
    for stretch in stretches:
        is_op = len(stretch) == 1 and is_cut(stretch[0])
        reads.append([node for node in _used(stretch) if not (is_op and node in written)])
    reads.append(list(output.all_input_nodes))
    last = {node: at for at, inputs in enumerate(reads) for node in inputs}
    parts = []
    for at, (stretch, inputs) in enumerate(zip(stretches, reads, strict=False)):
        spent = [node for node, last_at in last.items() if last_at == at]
        if len(stretch) == 1 and is_cut(stretch[0]):
            parts.append(Segment(tuple(inputs), (writes(stretch[0]),), tuple(spent), stretch[0], None))
        else:
            outputs = [node for node in stretch if last.get(node, -1) > at]
            piece = _piece(stretch, inputs, outputs)
            parts.append(Segment(tuple(inputs), tuple(outputs), tuple(spent), None, piece, _kind(piece, inputs)))
    return parts


def _is_size(node: fx.Node) -> bool:
    """Whether the node is a number computed from the lengths of the inputs. Every piece computes such numbers again."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, torch.SymFloat))


def _used(stretch: Sequence[fx.Node]) -> list[fx.Node]:
    """Values that the stretch reads but does not compute, in the order of first use."""
    values: dict[fx.Node, None] = {}
    inside = set(stretch)

    def look(node: fx.Node) -> None:
        if _is_size(node):
            for other in node.all_input_nodes:
                look(other)
        elif node not in inside:
            values[node] = None

    for node in stretch:
        for other in node.all_input_nodes:
            look(other)
    return list(values)


def _piece(stretch: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Graph:
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"given_{at}") for at, node in enumerate(inputs)}

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:  # a size, or next in the stretch
            args = fx.map_arg(node.args, copy)
            kwargs = fx.map_arg(node.kwargs, copy)
            copies[node] = graph.create_node("call_function", node.target, args, kwargs)
        return copies[node]

    for node in stretch:
        copy(node)
    graph.output(tuple(copies[node] for node in outputs))
    graph.eliminate_dead_code()
    return fx.GraphModule(torch.nn.Module(), graph)


def _kind(piece: Graph, inputs: Sequence[fx.Node]) -> str:
    values = [node.meta.get("val") for node in inputs]
    types = [(value.dtype, tuple(value.shape), value.stride()) for value in values if value is not None]
    return f"{piece.code}\n{types}"
