"""The adapters of the models. The daemon keeps the list, so that a model has its adapters again after a reload."""

from __future__ import annotations

import asyncio
import difflib
import itertools
import logging
import os
import re
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from ..api.admin import AdapterEntry
from ..api.models import Request
from ..errors import AdapterNotFound, InvalidRequest, Stopping, WorkerDied
from ..frames import AdapterLoaded, Embed, Generate, LoadAdapter, UnloadAdapter
from ..store.local import snapshots
from ..store.names import GUIDE, is_path
from .process import WorkerProcess

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")


@dataclass(slots=True)
class _Adapter:
    number: int
    name: str
    path: Path
    pinned: bool
    scale: float = 0.0  # default for requests that select no adapter; 0: they do not use this adapter
    version: str = ""  # hash of the files when the adapter was loaded; other files are refused until a new load
    base: str = ""  # name or path of the base model in the files
    warning: str = ""  # from the last worker that registered the adapter
    worker: WorkerProcess | None = None  # the last worker that registered the adapter


class Adapters:
    """The adapters of all models, by the id of their model and by their name.

    A worker registers an adapter when it is loaded. A new worker of the same model registers it again before the first
    request that selects it.
    """

    def __init__(self) -> None:
        self._by_model: dict[str, dict[str, _Adapter]] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # model id → lock of its adapters
        self._numbers = itertools.count()

    def entries(self) -> list[AdapterEntry]:
        """Every adapter, in the order in which they were first loaded."""
        entries = []
        for model, adapters in self._by_model.items():
            entries += [_describe(model, adapter) for adapter in adapters.values()]
        return sorted(entries, key=lambda entry: entry.id)

    def find(self, model: str, name: str, param: str = "lora") -> _Adapter:
        """The adapter of a model. Raises AdapterNotFound, which names the adapters of the model."""
        adapters = self._by_model.get(model, {})
        if name not in adapters:
            raise _not_found(f"{model} has no adapter {name!r}", name, adapters, param, _builtin(model))
        return adapters[name]

    def has(self, name: str) -> bool:
        """True if a model has an adapter of this name."""
        return any(name in adapters for adapters in self._by_model.values())

    def find_model(self, name: str) -> str:
        """The id of the only model with an adapter of this name. Raises AdapterNotFound or InvalidRequest."""
        models = [model for model, adapters in self._by_model.items() if name in adapters]
        if not models:
            names = [entry.name for entry in self.entries()]
            raise _not_found(f"no model has an adapter {name!r}", name, names, "lora_name")
        if len(models) > 1:
            raise InvalidRequest(
                f"several models have an adapter {name!r}: {', '.join(models)}", hint="name the model", param="model"
            )
        return models[0]

    async def load(
        self,
        worker: WorkerProcess,
        name: str,
        path: Path,
        *,
        replace: bool = False,
        reuse: bool = False,
        pinned: bool = False,
    ) -> AdapterEntry:
        """Register the adapter in the folder `path` with a worker. Running requests go on.

        `replace`: the adapter may replace one of the same name. `reuse`: an adapter of the same name, folder and files
        stays. Raises InvalidRequest for a malformed name, or a name in use otherwise; AdapterUnusable if the folder is
        not an adapter of this model, or has other files than the adapter to reuse.
        """
        if not NAME.fullmatch(name):
            raise InvalidRequest(
                f"the adapter name {name[:200]!r} is malformed",
                hint="a name has up to 200 letters, digits and . _ / -, and begins with a letter or digit",
                param="lora_name",
            )
        async with self._locks[worker.model]:
            adapter = _Adapter(next(self._numbers), name, path, pinned)
            previous = self._by_model.get(worker.model, {}).get(name)
            if previous is not None:
                _succeed(adapter, previous, replace=replace, reuse=reuse)
            await _register(worker, adapter)
            self._by_model.setdefault(worker.model, {})[name] = adapter
            return _describe(worker.model, adapter)

    async def unload(self, model: str, name: str) -> None:
        """Remove an adapter; requests that run with it go on. Raises AdapterNotFound."""
        self.find(model, name, "lora_name")  # raises for an unknown model, which must get no lock
        async with self._locks[model]:
            adapter = self.find(model, name, "lora_name")
            del self._by_model[model][name]
            worker = adapter.worker
            if worker is None or worker.state != "ready":
                return
            with suppress(WorkerDied, Stopping):  # a worker that has ended has no adapters
                async with worker.open([UnloadAdapter(id=uuid.uuid4().hex, name=name)], weight=0) as stream:
                    await stream.take()

    def forget(self, model: str) -> None:
        """Remove all adapters of a model that is unloaded."""
        self._by_model.pop(model, None)

    def set_scales(self, scales: Mapping[int, float]) -> None:
        """Set the default scales by adapter id; an adapter that is not in `scales` gets 0.

        Raises AdapterNotFound, or InvalidRequest if two adapters of a model would have a scale.
        """
        numbers = {entry.id for entry in self.entries()}
        for number in scales:
            if number not in numbers:
                raise AdapterNotFound(f"there is no adapter with id {number}", hint=f"ids: {sorted(numbers)}")
        for model, adapters in self._by_model.items():
            chosen = [adapter.name for adapter in adapters.values() if scales.get(adapter.number)]
            if len(chosen) > 1:
                raise InvalidRequest(
                    f"only one adapter of {model} may have a scale that is not 0, not {', '.join(chosen)}",
                    param="scale",
                )
        for adapters in self._by_model.values():
            for adapter in adapters.values():
                adapter.scale = scales.get(adapter.number, 0.0)

    def check(self, model: str, name: str, requests: Iterable[Request]) -> str:
        """The name of the adapter that the client selects; empty if it selects none.

        `name`: the adapter in the model id; empty: none. Raises AdapterNotFound, or InvalidRequest if both the model id
        and a request select an adapter.
        """
        selected = name
        for request in requests:
            if not isinstance(request, Generate | Embed) or request.adapter is None:
                continue
            if name:
                raise InvalidRequest(
                    f"the model id selects the adapter {name!r}, so lora must be missing", param="lora"
                )
            selected = request.adapter
        if selected:
            self._add_builtin(model, selected)
            self.find(model, selected, "model" if name else "lora")
        return selected

    async def prepare(
        self, worker: WorkerProcess, name: str, requests: Sequence[Request]
    ) -> tuple[str, Sequence[Request]]:
        """The name of the adapter of the requests, and the requests with `adapter` and `adapter_scale` set.

        Registers the adapter if the worker does not have it. Raises the errors of `check` and `load`.
        """
        selected = self.check(worker.model, name, requests)
        defaults: dict[str, object] = {}
        if name:
            defaults = {"adapter": name}
        elif not selected:
            defaults = self._defaults(worker.model)
        prepared: list[Request] = []
        for request in requests:
            if isinstance(request, Generate | Embed) and request.adapter is None:
                request = structs.replace(request, **defaults)
                selected = request.adapter or ""
            prepared.append(request)
        if selected:
            await self._ensure(worker, selected)
        return selected, prepared

    def _add_builtin(self, model: str, name: str) -> None:
        """Add the built-in adapter of this name to the list, unless the model has an adapter of this name.

        A request can select it without a load before: the worker registers it as it does after a reload.
        """
        if name in self._by_model.get(model, {}):
            return
        folder = _builtin(model).get(name)
        if folder is not None:
            adapter = _Adapter(next(self._numbers), name, folder, pinned=False)
            self._by_model.setdefault(model, {})[name] = adapter

    def _defaults(self, model: str) -> dict[str, object]:
        """The adapter fields for a Generate frame that selects no adapter; empty: it uses the base model."""
        for adapter in self._by_model.get(model, {}).values():
            if adapter.scale:
                return {"adapter": adapter.name, "adapter_scale": adapter.scale}
        return {}

    async def _ensure(self, worker: WorkerProcess, name: str) -> None:
        """Register an adapter with a worker that does not have it."""
        if self.find(worker.model, name).worker is worker:
            return
        async with self._locks[worker.model]:
            adapter = self.find(worker.model, name)
            if adapter.worker is not worker:
                await _register(worker, adapter)


def _succeed(adapter: _Adapter, previous: _Adapter, *, replace: bool, reuse: bool) -> None:
    """Give an adapter the state of an earlier adapter of the same name. `replace`, `reuse`: as in Adapters.load. Raises
    InvalidRequest."""
    is_reused = reuse and not replace and previous.path == adapter.path
    if not replace and not is_reused:
        raise InvalidRequest(
            f"adapter {adapter.name!r} is already loaded",
            hint="to replace it, use load_inplace: true (localllm adapters load --replace)",
            param="lora_name",
        )
    adapter.number, adapter.scale = previous.number, previous.scale
    if is_reused:
        adapter.version = previous.version
        adapter.pinned |= previous.pinned


async def _register(worker: WorkerProcess, adapter: _Adapter) -> None:
    """Load an adapter in a worker. Raises AdapterUnusable."""
    frame = LoadAdapter(
        id=uuid.uuid4().hex,
        name=adapter.name,
        path=str(adapter.path),
        pinned=adapter.pinned,
        version=adapter.version,
    )
    async with worker.open([frame]) as stream:
        [reply] = await stream.take()
    assert isinstance(reply, AdapterLoaded), type(reply)
    adapter.worker = worker
    adapter.version = reply.version
    adapter.base = reply.base
    adapter.warning = reply.warning
    if reply.warning:
        log.warning("%s:%s: %s", worker.model, adapter.name, reply.warning)


def _describe(model: str, adapter: _Adapter) -> AdapterEntry:
    return AdapterEntry(
        id=adapter.number,
        name=adapter.name,
        model=model,
        path=str(adapter.path),
        scale=adapter.scale,
        pinned=adapter.pinned,
        version=adapter.version,
        base=adapter.base,
        warning=adapter.warning,
    )


def _builtin(model: str) -> dict[str, Path]:
    """The folders of the built-in adapters of a model, by their names."""
    return {ref.id: ref.path for ref in snapshots.builtin_adapters()} if model == GUIDE else {}


def _not_found(
    message: str, name: str, loaded: Iterable[str], param: str, builtin: Iterable[str] = ()
) -> AdapterNotFound:
    """The error for an unknown adapter. Its hint has all names, after a similar name if there is one."""
    loaded = list(loaded)
    others = [other for other in builtin if other not in loaded]
    similar = difflib.get_close_matches(name, [*loaded, *others], n=1)
    hint = f"did you mean {similar[0]}? " if similar else ""
    hint += f"loaded adapters: {', '.join(loaded) or 'none'}"
    hint += f"; built in: {', '.join(others)}" if others else ""
    return AdapterNotFound(message, hint=hint, param=param)


def split_name(name: str | None) -> tuple[str | None, str]:
    """Model and adapter of the id `model:adapter`. The adapter is empty if the id has none."""
    if name is None or (is_path(name) and os.path.exists(name)):  # noqa: PTH110 - the path may be too long
        return name, ""
    model, colon, adapter = name.rpartition(":")
    return (model, adapter) if colon and adapter else (name, "")
