"""Which architectures the installed llama.cpp knows. No function of llama.cpp lists them."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from ...engine.errors import ModelRefused
from .library import load_model, log, problem

_KEY = b"general.architecture"
_STRING = 8  # type of a metadata value
_UNKNOWN = "unknown model architecture"


@cache
def is_known(architecture: str) -> bool:
    """Whether llama.cpp has code for an architecture; True if llama.cpp cannot be asked.

    llama.cpp refuses a file that has only the name of its architecture, and gives another reason if it knows the name.
    """
    if problem():
        return True
    name = architecture.encode()
    entry = struct.pack("<Q", len(_KEY)) + _KEY + struct.pack("<IQ", _STRING, len(name)) + name
    try:
        with tempfile.TemporaryDirectory(prefix="localllm-") as folder, _without_log():
            file = Path(folder, "architecture.gguf")
            file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
            load_model(architecture, [file], vocab_only=True)
    except ModelRefused as error:
        return _UNKNOWN not in str(error)
    except OSError:  # a read-only disk; a load gives the reason
        return True
    return True


@contextmanager
def _without_log() -> Iterator[None]:
    """The refusal of that file is no error of a model."""
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = False
