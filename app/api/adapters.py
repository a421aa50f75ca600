"""The routes that load, unload and list adapters: those of vLLM and of llama.cpp's server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...engine.ranges import RANGES
from ..errors import InvalidRequest
from ..store import adapters
from .admin import AdapterScale, LoadAdapterBody, UnloadAdapterBody
from .body import is_local, read_json, read_list
from .models import Models


class AdapterRoutes:
    """The handlers of the adapter routes."""

    def __init__(self, models: Models, limit: int) -> None:
        """`limit`: maximum size of a request body in bytes."""
        self.models = models
        self.limit = limit

    async def load(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter, as in vLLM. The reply is plain text: clients of vLLM compare it.

        A warning about the adapter is in its entry of GET /lora-adapters.
        """
        body = await read_json(request.scope, request.receive, LoadAdapterBody, self.limit)
        await self.models.load_adapter(
            body.lora_name,
            body.lora_path,
            model=body.model,
            local=is_local(request.scope),
            replace=body.load_inplace,
            reuse=body.reuse,
            pinned=body.pinned,
        )
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter, as in vLLM."""
        body = await read_json(request.scope, request.receive, UnloadAdapterBody, self.limit)
        await self.models.unload_adapter(body.lora_name, model=body.model)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def entries(self, request: Request) -> Response:
        """GET /lora-adapters, as in llama.cpp's server."""
        return self._entries()

    async def folders(self, request: Request) -> Response:
        """GET /admin/adapters: the adapters on this machine, loaded or not."""
        loaded = [Path(entry.path) for entry in self.models.adapters()]
        folders = await asyncio.to_thread(adapters.folders, loaded)
        return Response(msgspec.json.encode(folders), media_type="application/json")

    async def set_scales(self, request: Request) -> Response:
        """POST /lora-adapters, as in llama.cpp's server. The body is a list of adapter ids and default scales."""
        entries = await read_list(request.scope, request.receive, AdapterScale, self.limit)
        scales: dict[int, float] = {}
        for entry in entries:
            if entry.id in scales:
                raise InvalidRequest(f"adapter id {entry.id} occurs twice", param="id")
            if entry.scale not in RANGES["adapter_scale"]:
                raise InvalidRequest(f"scale must be {RANGES['adapter_scale']}, not {entry.scale}", param="scale")
            scales[entry.id] = entry.scale
        self.models.set_adapter_scales(scales)
        return self._entries()

    def _entries(self) -> Response:
        return Response(msgspec.json.encode(self.models.adapters()), media_type="application/json")
