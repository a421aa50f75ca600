"""What the engine and the backends refuse, in the app's words. The only place where one becomes the other."""

from __future__ import annotations

from ...backends import BackendUnavailable
from ...engine.errors import CacheOverflow, ContextOverflow, EngineError, ModelRefused, RequestRefused, SettingRefused
from ..errors import (
    AppError,
    CacheTooSmall,
    ConfigError,
    ContextTooLong,
    InvalidRequest,
    ModelUnusable,
    NoBackend,
    WorkerDied,
)


def app_error(error: Exception) -> AppError | None:
    """None for an exception nobody raised on purpose: its text is for the log, not for a client."""
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
            return ModelUnusable(str(error), hint=error.hint, param="model")
        case SettingRefused():
            return ConfigError(str(error), hint=error.hint)
        case BackendUnavailable():
            return NoBackend(str(error), hint=error.hint)
        case EngineError():  # RunnerFailed, or asked of an engine that was closed by it
            return WorkerDied(f"the engine failed and restarts: {error}")
    return None


def internal_error() -> AppError:
    """Said to a client instead of a stack trace."""
    return AppError("internal error in localllm", hint="see the log of the worker in the log folder")
