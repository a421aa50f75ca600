"""Registers the adapters of a model with its engine, and finds them by name."""

from __future__ import annotations

import asyncio
import contextlib

from ...engine.engine import Engine
from ...engine.errors import ModelRefused
from ...engine.files.adapter_base import check_base
from ...engine.files.adapter_files import AdapterFiles, read_adapter
from ...engine.lora import Adapter
from .. import frames
from ..errors import AdapterNotFound, AdapterUnusable
from .opening import OpenModel


async def load_adapter(frame: frames.LoadAdapter, model: OpenModel, engine: Engine) -> frames.AdapterLoaded:
    """Read an adapter in a thread, then register it on the event loop.

    Raises AdapterUnusable for files that the model cannot use. Damaged files may cause any exception.
    """
    with contextlib.ExitStack() as stack:
        try:
            files = await asyncio.to_thread(read_adapter, frame.path)
            _check_version(frame, files)
            warnings = check_base(files, model.info.model, model.model_type), files.warning
            adapter = Adapter(frame.name, frame.path, files.version)
            await asyncio.to_thread(stack.enter_context, engine.prepared_adapter(adapter))
            engine.register_adapter(adapter, pinned=frame.pinned)
        except ModelRefused as error:
            raise AdapterUnusable(str(error), hint=error.hint, param="lora_path") from error
        return frames.AdapterLoaded(
            id=frame.id,
            version=files.version,
            rank=files.rank,
            base=files.base,
            warning="; ".join(filter(None, warnings)),
        )


def find_adapter(name: str | None, engine: Engine) -> Adapter | None:
    """The registered adapter of this name; None for the base model. Raises AdapterNotFound."""
    if not name:
        return None
    adapter = engine.find_adapter(name)
    if adapter is None:
        raise unknown_adapter(name, engine)
    return adapter


def unknown_adapter(name: str, engine: Engine) -> AdapterNotFound:
    """The error for an adapter that is not registered."""
    loaded = ", ".join(adapter.name for adapter in engine.adapters) or "none"
    return AdapterNotFound(f"adapter {name!r} is not loaded", hint=f"loaded adapters: {loaded}", param="lora")


def _check_version(frame: frames.LoadAdapter, files: AdapterFiles) -> None:
    """Raises AdapterUnusable if the files are not those of the required version."""
    if frame.version and frame.version != files.version:
        raise AdapterUnusable(
            f"the files of adapter {frame.name!r} have changed since it was loaded",
            hint="to use the new files, load it again with load_inplace: true (localllm adapters load --replace)",
            param="lora_path",
        )
