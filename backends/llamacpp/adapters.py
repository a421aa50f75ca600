"""LoRA adapters, which llama.cpp adds to all tokens of a call."""

from __future__ import annotations

import ctypes
import tempfile
import threading
from pathlib import Path
from typing import Any

from ...engine.errors import ModelRefused
from ...engine.files.adapter_files import AdapterFiles, is_gguf
from ...engine.files.adapter_fit import check_copies, read_registered, refusals_of
from ...engine.files.model_files import ModelFiles
from ...engine.lora import Adapter
from .library import library
from .peft import base_tensors, check_tied, write_adapter


class Adapters:
    """The adapters of one model, and the adapter in each slot."""

    def __init__(self, model: Any, files: ModelFiles) -> None:
        self._model = model
        self._files = files
        self._loaded: dict[Adapter, Any] = {}  # pointers of llama.cpp
        self._slots: dict[int, Any] = {}
        self._selected: tuple[Any, float] | None = None  # the adapter that the context uses, and its scale
        self._lock = threading.Lock()

    def prepare(self, adapter: Adapter) -> None:
        """Read the files of an adapter. Raises ModelRefused if it does not fit the model, or if its files changed."""
        with refusals_of(adapter):
            files = read_registered(adapter)
            if not is_gguf(files.path):
                self._add_folder(adapter, files)
                return
            for name in files.factors:
                check_tied(name, self._files)
            self._add(adapter, files.path)

    def _add_folder(self, adapter: Adapter, files: AdapterFiles) -> None:
        copies = {name: self._files.tensors[tensor] for name, tensor in base_tensors(self._files).items()}
        check_copies(files, copies)
        try:
            with tempfile.TemporaryDirectory(prefix="localllm-") as folder:
                file = Path(folder, "adapter.gguf")
                write_adapter(files, self._files, file)
                self._add(adapter, file)
        except OSError as error:
            raise ModelRefused(
                f"a temporary file for llama.cpp cannot be written: {error.strerror or error}",
                "free space there, or set TMPDIR to another folder",
            ) from error

    def _add(self, adapter: Adapter, file: Path) -> None:
        lib = library()
        with self._lock:
            if adapter in self._loaded:
                return
            lib.forget_errors()
            loaded = lib.c.llama_adapter_lora_init(self._model, str(file).encode())
            if not loaded:
                reason = lib.last_errors or "no reason given"
                raise ModelRefused(f"llama.cpp cannot load it: {reason}"[:500])
            self._loaded[adapter] = loaded

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
