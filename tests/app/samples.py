"""Values that tests of the API, the daemon and the worker share."""

from __future__ import annotations

from typing import Any

from localllm.app.frames import ModelInfo


def model_info(**more: Any) -> ModelInfo:
    """The description of a small model. `more`: other values of its fields."""
    small: dict[str, Any] = {
        "model": "m",
        "backend": "cpu",
        "device": "d",
        "dtype": "float32",
        "context": 64,
        "vocab": 11,
        "weight_bytes": 1,
        "cache_bytes": 1,
        "cache_tokens": 1,
    }
    return ModelInfo(**small | more)
