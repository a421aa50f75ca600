"""Checks that calls of a torch module, such as torch.xpu, fit the installed torch. torch's CPU build has the Python
functions of its devices, and their classes over dummies."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

ANY = object()
Call = tuple[str, int, tuple[str, ...]]  # name after the module, number of positional arguments, keywords

# Calls through variables in the code of all torch devices. The first argument of a method is self.
INDIRECT: tuple[Call, ...] = (
    ("synchronize", 0, ()),
    ("empty_cache", 0, ()),
    ("init", 0, ()),
    ("mem_get_info", 0, ()),
    ("memory_reserved", 0, ()),
    ("set_per_process_memory_fraction", 1, ()),
    ("current_device", 0, ()),
    ("current_stream", 0, ()),
    ("graph_pool_handle", 0, ()),
    ("stream", 1, ()),
    ("streams.Stream.__new__", 2, ()),
    ("streams.Stream.wait_stream", 2, ()),
    ("streams.Stream.synchronize", 1, ()),
    ("streams.Event.__new__", 1, ("enable_timing",)),
    ("streams.Event.record", 1, ()),
    ("streams.Event.synchronize", 1, ()),
    ("streams.Event.elapsed_time", 2, ()),
)


def direct_calls(module: ModuleType, *sources: Path) -> list[Call]:
    """The calls of the module that the sources spell out."""
    prefix = f"{module.__name__}."
    calls = set()
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text("utf-8"))):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and name.startswith(prefix) and "(" not in name:
                keywords = tuple(str(keyword.arg) for keyword in node.keywords)
                calls.add((name.removeprefix(prefix), len(node.args), keywords))
    return sorted(calls)


def check(module: ModuleType, call: Call) -> None:
    """Raises AttributeError or TypeError if the installed torch has no such function, or other parameters."""
    name, positional, keywords = call
    target: Callable[..., Any] = reduce(getattr, name.split("."), module)  # type: ignore[arg-type,assignment]
    inspect.signature(target).bind(*[ANY] * positional, **dict.fromkeys(keywords, ANY))
