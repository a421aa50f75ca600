"""The library llama.cpp: its import, its log, its devices and its models. Only `library` and its callers import it."""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...engine.errors import ModelRefused, RunnerFailed
from ..llamacpp_install import PACKAGE
from ..machine import limit_spinning

MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
MIN_VERSION = (0, 3, 36)  # ctypes does not notice that an older version has other structures

log = logging.getLogger(__name__)

_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}  # ggml_log_level
_CONTINUED = 5  # the level of a text that continues the last line
_KINDS = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}  # ggml_backend_dev_type
_FUNCTION = re.compile(r"^[\w:~<>]+: ")  # the C++ function at the beginning of a line of llama.cpp's log
# Warnings of usual loads: the cache has room for several sequences and for all positions, tokens have hidden states.
_EXPECTED = re.compile("possible training context overflow|model default pooling_type|using full-size SWA cache")
_ABORT = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class Library:
    """The functions of llama.cpp, as attributes with their C names."""

    def __init__(self) -> None:
        limit_spinning()
        # Otherwise an exception that llama.cpp does not catch starts a debugger.
        os.environ["GGML_NO_BACKTRACE"] = "1"
        _share_cpp_library()
        self.version: str = import_module("llama_cpp").__version__
        if tuple(map(int, re.findall(r"\d+", self.version)))[:3] < MIN_VERSION:
            raise ImportError(f"version {self.version} is too old")
        self.c: Any = import_module("llama_cpp.llama_cpp")
        self._lines = _Lines()
        # ctypes keeps no reference to a callback.
        self._log = self.c.llama_log_callback(self._lines.add)
        self._abort = _ABORT(self._log_abort)
        self.c.llama_log_set(self._log, None)
        self.ggml("ggml_set_abort_callback", ctypes.c_void_p, _ABORT)(self._abort)
        self.c.llama_backend_init()

    def ggml(self, name: str, result: Any, *arguments: Any) -> Any:
        """A function of ggml, on which the library of llama.cpp depends."""
        function = getattr(self.c._lib, name)
        function.restype = result
        function.argtypes = arguments
        return function

    @property
    def has_amx(self) -> bool:
        """Whether llama.cpp uses AMX instructions of this CPU."""
        return b"AMX_INT8 = 1" in self.c.llama_print_system_info()

    def forget_errors(self) -> None:
        self._lines.errors.clear()

    def _log_abort(self, message: bytes) -> None:
        """Called before llama.cpp ends the process, for example after a failed assertion. The reason of a GPU's error
        is in the error lines before the message."""
        reasons = [message.decode("utf-8", "replace"), self.last_errors]
        log.critical("llama.cpp ends the process: %s", "; ".join(filter(None, reasons)))

    @property
    def last_errors(self) -> str:
        """The error lines since `forget_errors`, without the names of C++ functions; at most three."""
        lines = [_FUNCTION.sub("", line).strip() for line in self._lines.errors]
        return "; ".join(dict.fromkeys(lines))


def _share_cpp_library() -> None:
    """Let llama.cpp use the C++ library of the process. Some linkers copy that library into the files of llama.cpp. If
    another module, for example numpy, has loaded another version, llama.cpp then crashes at its first string stream."""
    with suppress(OSError):  # macOS and Windows have no such file
        ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)


class _Lines:
    """Collects llama.cpp's log into lines: warnings and errors go to our log at their level, other lines to DEBUG."""

    def __init__(self) -> None:
        self.errors: deque[str] = deque(maxlen=3)
        self._begin = ""
        self._level = logging.DEBUG

    def add(self, level: int, text: bytes, _: object) -> None:
        """Called by llama.cpp on any thread."""
        if level != _CONTINUED:
            self._level = _LEVELS.get(level, logging.DEBUG)
        if self._level < logging.WARNING and not log.isEnabledFor(logging.DEBUG):
            return
        *lines, self._begin = (self._begin + text.decode("utf-8", "replace")).split("\n")
        for line in lines:
            self._write(line.rstrip())

    def _write(self, line: str) -> None:
        if self._level >= logging.ERROR:
            self.errors.append(line)
        is_quiet = self._level < logging.WARNING or _EXPECTED.search(line)
        log.log(logging.DEBUG if is_quiet else self._level, "%s", line)


@cache
def library() -> Library:
    """The library; the first call imports it. Raises ImportError, OSError or RuntimeError if that is not possible."""
    return Library()


def version() -> str:
    """The version of llama-cpp-python."""
    return library().version


def problem() -> str:
    """The reason why the library cannot be used; empty if it can."""
    if not is_installed():
        return f"{PACKAGE} is not installed"
    try:
        library()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"{PACKAGE} is installed, but does not work ({error})"
    return ""


def is_installed() -> bool:
    """Whether the package is there; it may be a build that does not work."""
    return find_spec("llama_cpp") is not None


@dataclass(frozen=True, slots=True)
class BuildDevice:
    """A device that the installed build of llama.cpp can use."""

    name: str  # of ggml, for example CPU, CUDA0 or Vulkan0
    description: str  # name of the hardware
    kind: str  # cpu, gpu, igpu (with main memory) or accel (for example BLAS)
    memory: int  # bytes
    free: int  # bytes


def devices() -> tuple[BuildDevice, ...]:
    """All devices of the installed build, in llama.cpp's order."""
    ggml = library().ggml
    count = ggml("ggml_backend_dev_count", ctypes.c_size_t)()
    get = ggml("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    return tuple(_device(get(index)) for index in range(count))


def _device(handle: int) -> BuildDevice:
    ggml = library().ggml
    size = ctypes.POINTER(ctypes.c_size_t)
    name = ggml("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)(handle).decode()
    text = ggml("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)(handle)
    kind = ggml("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)(handle)
    free = ctypes.c_size_t()
    total = ctypes.c_size_t()
    ggml("ggml_backend_dev_memory", None, ctypes.c_void_p, size, size)(handle, free, total)
    return BuildDevice(name, text.decode("utf-8", "replace"), _KINDS.get(kind, ""), total.value, free.value)


def gpus_of(devices: Sequence[BuildDevice]) -> list[BuildDevice]:
    """The devices that llama.cpp gives layers to: GPUs with their own memory; without those, integrated ones."""
    discrete = [device for device in devices if device.kind == "gpu"]
    return discrete or [device for device in devices if device.kind == "igpu"]


def load_model(
    name: str, shards: Sequence[Path], *, vocab_only: bool = False, gpu_layers: int = -1, repack: bool = True
) -> Any:
    """A llama_model pointer for GGUF files that engine.files.model_files has accepted; `shards` in their order.

    `gpu_layers`: number of layers in the memory of the GPUs; -1: all. `repack`: whether llama.cpp may store weights in
    the layouts of this CPU's fastest instructions. The caller frees the model with llama_model_free.

    Raises ModelRefused with llama.cpp's own reason.
    """
    lib = library()
    params = lib.c.llama_model_default_params()
    params.vocab_only = vocab_only
    params.n_gpu_layers = gpu_layers
    params.use_extra_bufts = repack
    paths = (ctypes.c_char_p * len(shards))(*(str(path).encode() for path in shards))
    lib.forget_errors()
    model = lib.c.llama_model_load_from_splits(paths, len(shards), params)
    if not model:
        raise ModelRefused(f"{name}: llama.cpp cannot load it: {lib.last_errors or 'no reason given'}"[:500])
    return model


def failed(message: str) -> RunnerFailed:
    """The error for a call that failed, with llama.cpp's own reason."""
    errors = library().last_errors
    return RunnerFailed(f"{message}: {errors}"[:500] if errors else message)
