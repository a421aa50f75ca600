"""LoRA adapters in GGUF files, which llama.cpp adds to all tokens of a call."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from ...engine.adapterfiles import AdapterFiles, is_gguf, read_adapter
from ...engine.errors import ModelRefused
from ...engine.lora import Adapter
from .library import library


class Adapters:
    """The adapters of one model, and the adapter in each slot."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._loaded: dict[Adapter, Any] = {}  # pointers of llama.cpp
        self._slots: dict[int, Any] = {}
        self._selected: tuple[Any, float] | None = None  # the adapter that the context uses, and its scale
        self._lock = threading.Lock()

    def prepare(self, adapter: Adapter) -> None:
        """Read the file of an adapter. Raises ModelRefused if it does not fit the model, or if its files changed."""
        files = self._read(adapter)
        lib = library()
        with self._lock:
            if adapter in self._loaded:
                return
            lib.forget_errors()
            loaded = lib.c.llama_adapter_lora_init(self._model, str(files.path).encode())
            if not loaded:
                reason = lib.last_errors or "no reason given"
                raise ModelRefused(f"adapter {adapter.name}: llama.cpp cannot load it: {reason}"[:500])
            self._loaded[adapter] = loaded

    def _read(self, adapter: Adapter) -> AdapterFiles:
        try:
            files = read_adapter(adapter.path)
        except ModelRefused as error:
            raise ModelRefused(f"adapter {adapter.name}: {error}", error.hint) from error
        if not is_gguf(files.path):
            raise ModelRefused(
                f"adapter {adapter.name}: a GGUF model needs an adapter in a GGUF file",
                "convert the adapter with convert_lora_to_gguf.py of llama.cpp",
            )
        if files.version != adapter.version:
            raise ModelRefused(f"adapter {adapter.name}: its files have changed", "load the adapter again")
        return files

    def load(self, slot: int, adapter: Adapter) -> None:
        with self._lock:
            self._slots[slot] = self._loaded[adapter]

    def forget(self, adapter: Adapter) -> None:
        """Free an adapter. No context may use it."""
        with self._lock:
            loaded = self._loaded.pop(adapter, None)
            if loaded is None:
                return
            self._slots = {slot: pointer for slot, pointer in self._slots.items() if pointer is not loaded}
            library().c.llama_adapter_lora_free(loaded)

    def select(self, context: Any, slot: int, scale: float) -> None:
        """Use the adapter in `slot`, multiplied by `scale`, in the next calls of the context. Slot 0: no adapter."""
        selected = (self._slots[slot], scale) if slot and scale else None
        if selected == self._selected:
            return
        self._selected = selected
        c = library().c
        if selected is None:
            c.llama_set_adapters_lora(context, None, 0, None)
            return
        pointers = (c.llama_adapter_lora_p_ctypes * 1)(selected[0])
        c.llama_set_adapters_lora(context, pointers, 1, (ctypes.c_float * 1)(scale))
