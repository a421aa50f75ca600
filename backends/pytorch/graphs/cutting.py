"""A forward as a graph of torch's ops, cut at some of them into pieces that can be compiled and recorded."""

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
class Part:
    """A stretch of a graph, or an op at which it was cut: values of the graph in, values of the graph out."""

    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    spent: tuple[fx.Node, ...]  # values that no later part reads
    op: fx.Node | None  # where it was cut
    graph: Graph | None  # otherwise: takes the inputs, gives a tuple of the outputs
    kind: str = ""  # pieces of one kind compute the same, of inputs of the same types and shapes

    def changing(self) -> Iterator[tuple[int, int]]:
        """(input, dimension) of all sizes that differ from step to step."""
        for at, node in enumerate(self.inputs):
            for dim, size in enumerate(node.meta["val"].shape if "val" in node.meta else ()):
                if isinstance(size, torch.SymInt):
                    yield at, dim


def traced(forward: Callable[..., Tensor], *examples: Tensor) -> Graph:
    """`forward` as a graph, for inputs of any lengths: examples are one-dimensional, and those of equal length stay so.

    Raises SettingRefused where some Python on the way has looked at a length, which would hold for that one only.
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


def cut(graph: Graph, is_cut: Callable[[fx.Node], bool], writes: Callable[[fx.Node], fx.Node]) -> list[Part]:
    """The parts in their order: a piece, an op at which it was cut, a piece, … `writes` says which node holds what
    that op has written; nothing else makes it, so the op's implementation may put its answer anywhere."""
    made = {writes(node) for node in graph.graph.nodes if is_cut(node)}
    stretches: list[list[fx.Node]] = [[]]
    for node in graph.graph.nodes:
        if is_cut(node):
            stretches += [[node], []]
        elif node.op == "call_function" and node not in made and not _is_size(node):
            stretches[-1].append(node)
    (answer,) = (node for node in graph.graph.nodes if node.op == "output")
    uses = [[node for node in _used(stretch) if node not in made or not is_cut(stretch[0])] for stretch in stretches]
    uses.append(list(answer.all_input_nodes))
    last = {node: at for at, used in enumerate(uses) for node in used}
    parts = []
    for at, (stretch, used) in enumerate(zip(stretches, uses, strict=False)):
        spent = [node for node, last_at in last.items() if last_at == at]
        if len(stretch) == 1 and is_cut(stretch[0]):
            parts.append(Part(tuple(used), (writes(stretch[0]),), tuple(spent), stretch[0], None))
        else:
            outputs = [node for node in stretch if last.get(node, -1) > at]
            piece = _piece(stretch, used, outputs)
            parts.append(Part(tuple(used), tuple(outputs), tuple(spent), None, piece, _kind(piece, used)))
    return parts


def _is_size(node: fx.Node) -> bool:
    """A number that follows from the inputs' lengths: every piece works it out for itself."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, torch.SymFloat))


def _used(stretch: Sequence[fx.Node]) -> list[fx.Node]:
    """Values from outside that the stretch reads, in the order of first use."""
    found: dict[fx.Node, None] = {}
    own = set(stretch)

    def look(node: fx.Node) -> None:
        if _is_size(node):
            for other in node.all_input_nodes:
                look(other)
        elif node not in own:
            found[node] = None

    for node in stretch:
        for other in node.all_input_nodes:
            look(other)
    return list(found)


def _piece(stretch: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Graph:
    graph = fx.Graph()
    held = {node: graph.placeholder(f"given_{at}") for at, node in enumerate(inputs)}

    def copy(node: fx.Node) -> fx.Node:
        if node not in held:  # a size, or next in the stretch
            args = fx.map_arg(node.args, copy)
            kwargs = fx.map_arg(node.kwargs, copy)
            held[node] = graph.create_node("call_function", node.target, args, kwargs)
        return held[node]

    for node in stretch:
        copy(node)
    graph.output(tuple(held[node] for node in outputs))
    graph.eliminate_dead_code()
    return fx.GraphModule(torch.nn.Module(), graph)


def _kind(piece: Graph, inputs: Sequence[fx.Node]) -> str:
    given = [node.meta.get("val") for node in inputs]
    types = [(value.dtype, tuple(value.shape), value.stride()) for value in given if value is not None]
    return f"{piece.code}\n{types}"
