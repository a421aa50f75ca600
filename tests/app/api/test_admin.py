"""The defaults of the admin replies."""

from __future__ import annotations

import msgspec

from localllm.app.api.admin import LoadedModel, ModelEntry, Status


def test_loading_model_has_default_numbers() -> None:
    model = LoadedModel(id="m", state="loading", pid=7)
    rest = {name: value for name, value in msgspec.to_builtins(model).items() if name not in ("id", "state", "pid")}
    texts = ("backend", "device", "dtype", "quant")
    numbers = ("context", "memory", "token_bytes", "cache_tokens", "cache_used", "requests", "idle")
    assert rest == {
        **dict.fromkeys(texts, ""),
        **dict.fromkeys(numbers, 0),
        "purpose": "chat",
        "sampling": {},
        "unload_in": None,
        "warnings": (),
        "options": (),
        "kept": False,
    }


def test_model_entry_defaults() -> None:
    entry = msgspec.to_builtins(ModelEntry(id="m"))
    texts = dict.fromkeys(("path", "revision", "description", "install"), "")
    numbers = dict.fromkeys(("size", "unfinished", "packed", "context"), 0)
    flags = dict.fromkeys(("bundled", "loaded", "gguf"), False)
    assert entry == {"id": "m", **texts, **numbers, **flags, "problem": None, "purpose": "chat"}


def test_status_defaults() -> None:
    status = msgspec.to_builtins(Status(version="1", pid=7, url="u"))
    assert status == {"version": "1", "pid": 7, "url": "u", "stopping": False, "settings": {}, "cache": ""}
