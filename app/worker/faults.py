"""Translates errors of the engine and the backends to the errors of the app; no other file does."""

from __future__ import annotations

from ...backends import BackendUnavailable
from ...engine.errors import CacheOverflow, ContextOverflow, EngineError, ModelRefused, RequestRefused, SettingRefused
from ...engine.request import Delta
from ..errors import (
    AppError,
    CacheTooSmall,
    ConfigError,
    ContextTooLong,
    InvalidRequest,
    ModelUnusable,
    NoBackend,
    OutOfMemory,
    WorkerDied,
)


def app_error(error: Exception) -> AppError | None:
    """The app's error for an exception; None for an unexpected exception, whose text must not reach a client."""
    match error:
        case AppError():
            return error
        case ContextOverflow():
            return ContextTooLong(str(error), n_prompt_tokens=error.prompt, n_ctx=error.limit)
        case CacheOverflow():
            return CacheTooSmall(
                str(error),
                hint="use a smaller max_tokens, or raise the setting cache_mib",
                n_needed=error.needed,
                n_cache=error.limit,
            )
        case RequestRefused():
            return InvalidRequest(str(error))
        case ModelRefused():
            return ModelUnusable(str(error), hint=error.hint, param="model", **error.numbers)
        case SettingRefused():
            return ConfigError(str(error), hint=error.hint)
        case BackendUnavailable():
            return NoBackend(str(error), hint=error.hint)
        case EngineError():  # RunnerFailed, or a call to an engine after its runner failed
            return WorkerDied(f"the engine failed and restarts: {error}")
    return None


def check_finish(delta: Delta) -> None:
    """Raises InvalidRequest if the request failed, and OutOfMemory if the device ran out of memory in its step."""
    if delta.finish == "failed":
        raise InvalidRequest(f"the answer was stopped: {delta.error}")
    if delta.finish == "no_memory":
        raise OutOfMemory(
            f"the answer was stopped: {delta.error}",
            hint="try again; a smaller KV cache leaves more memory for steps (setting cache_mib)",
        )


def internal_error() -> AppError:
    """The error that a client gets for an unexpected exception."""
    return AppError("internal error in localllm", hint="see the log of the worker in the log folder")
