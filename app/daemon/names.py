"""Finds the model and the adapter that a client names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from ..errors import InvalidRequest, ModelNotFound
from ..store import names, resolved
from ..store.local.finding import find_model
from ..store.local.refs import ModelRef
from .adapters import Adapters, split_name


class Loaded(Protocol):
    """A model that is loaded or loads."""

    ref: ModelRef


class Names:
    """The names of models on this machine, of loaded models, and of their adapters."""

    def __init__(self, loaded: Mapping[str, Loaded], adapters: Adapters) -> None:
        """`loaded`: the loaded models by id. It changes as models are loaded and unloaded."""
        self._loaded = loaded
        self._adapters = adapters

    def only(self) -> str:
        """The id of the only loaded model. Raises InvalidRequest unless exactly one model is loaded."""
        if len(self._loaded) != 1:
            loaded = ", ".join(self._loaded) or "none"
            raise InvalidRequest(
                f"model is missing; it is optional only if exactly one model is loaded ({loaded})", param="model"
            )
        return next(iter(self._loaded))

    async def resolve(self, name: str, local: bool) -> ModelRef:
        """The model of a name. Raises ModelNotFound, also for a path of a client that is not local; WrongKind for an
        adapter; ModelUnusable for weights that are no complete model."""
        if not local and names.is_path(name):
            raise ModelNotFound("model must be an id, not a path", param="model")
        entry = self._loaded.get(name)
        return entry.ref if entry else await asyncio.to_thread(resolved.model, name, allow_path=local)

    async def _find(self, name: str, local: bool) -> ModelRef | None:
        if names.is_path(name) and not local:
            return None
        entry = self._loaded.get(name)
        if entry is not None:
            return entry.ref
        model = await asyncio.to_thread(find_model, name, allow_path=local)
        if model is not None:
            names.check_path(model.path)
        return model

    async def select(self, name: str | None, local: bool) -> tuple[ModelRef, str]:
        """The model and the adapter of a name; the adapter is empty if the name has none.

        The name of a model precedes `model:adapter`: `qwen3:0.6b` is a short name. An adapter alone is last. Raises
        ModelNotFound. Raises InvalidRequest if the path of the model is not printable UTF-8 text.
        """
        if name is None:
            return await self.resolve(self.only(), local), ""
        model = await self._find(name, local)
        if model is not None:
            return model, ""
        base, adapter = split_name(name)
        if adapter and (self._adapters.has(adapter) or not names.has_quant(name)):
            model = await self._find(base or self.only(), local)
            return model or await self.resolve(name, local), adapter
        # Clients of vLLM use the name of an adapter as the name of a model.
        if self._adapters.has(name):
            return await self.resolve(self._adapters.find_model(name), local), name
        return await self.resolve(name, local), ""


def is_inside(path: Path, folders: Iterable[Path]) -> bool:
    """True if the path or a parent of it is one of the folders, also through symbolic links of folders.

    The path and the folders may be files: the link of a file is not followed, because a store has links of other files.
    """
    location = _location(path)
    return any(location.is_relative_to(_location(folder)) for folder in folders)


def _location(path: Path) -> Path:
    return path.resolve() if path.is_dir() else path.parent.resolve() / path.name
