"""What several tests of the daemon begin with."""

from __future__ import annotations

from typing import Any

from localllm.app.frames import ModelInfo


def model_info(**more: Any) -> ModelInfo:
    """What a worker says of its model; `more` are the fields that matter to a test."""
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
