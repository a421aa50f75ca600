"""Every error of the app, with its exit code, HTTP status, type and code."""

from __future__ import annotations

from typing import ClassVar


class AppError(Exception):
    """An error with a message and, if possible, a hint how to fix it.

    `exit_code` is the exit code of the command line. `status`, `type` and `code` are for HTTP (OpenAI's error body).
    `param` names the parameter at fault; `numbers` are added to the error body.
    """

    exit_code: ClassVar[int] = 1
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, hint: str = "", param: str | None = None, **numbers: int) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param
        self.numbers = numbers


class ConfigError(AppError):
    exit_code, status, type, code = 2, 500, "server_error", "bad_configuration"


class InvalidRequest(AppError):
    exit_code, status, type, code = 2, 400, "invalid_request_error", "invalid_request"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class CacheTooSmall(InvalidRequest):
    code = "cache_size_exceeded"


class TemplateFailed(InvalidRequest):
    code = "chat_template_failed"


class Unauthorized(AppError):
    exit_code, status, type, code = 4, 401, "authentication_error", "invalid_api_key"


class Forbidden(AppError):
    exit_code, status, type, code = 4, 403, "permission_error", "forbidden"


class ModelNotFound(AppError):
    exit_code, status, type, code = 3, 404, "not_found_error", "model_not_found"


class RouteNotFound(AppError):
    exit_code, status, type, code = 3, 404, "not_found_error", "route_not_found"


class MethodNotAllowed(AppError):
    exit_code, status, type, code = 2, 405, "invalid_request_error", "method_not_allowed"


class BodyTooLarge(AppError):
    exit_code, status, type, code = 2, 413, "invalid_request_error", "request_too_large"


class UnsupportedMedia(AppError):
    """The request body is not plain JSON: another content type, or compressed."""

    exit_code, status, type, code = 2, 415, "invalid_request_error", "unsupported_media_type"


class ModelUnusable(AppError):
    """Model files are missing, corrupt or unsafe, or the architecture is unknown."""

    exit_code, status, type, code = 5, 422, "invalid_request_error", "model_unusable"


class NoBackend(AppError):
    exit_code, status, type, code = 5, 422, "invalid_request_error", "backend_unavailable"


class Overloaded(AppError):
    exit_code, status, type, code = 6, 429, "rate_limit_error", "server_overloaded"


class OutOfMemory(AppError):
    """The device ran out of memory in a step. The requests of that step end; all others continue."""

    exit_code, status, type, code = 6, 503, "server_error", "out_of_memory"


class Stopping(AppError):
    exit_code, status, type, code = 6, 503, "server_error", "server_stopping"


class WorkerDied(AppError):
    """The worker process ended. Its requests end; the next request starts a new process."""

    exit_code, status, type, code = 7, 500, "server_error", "worker_died"


class DaemonUnreachable(AppError):
    exit_code, status, type, code = 8, 503, "server_error", "daemon_unreachable"


class PortTaken(AppError):
    exit_code, status, type, code = 9, 503, "server_error", "port_taken"


class DownloadFailed(AppError):
    exit_code, status, type, code = 10, 502, "server_error", "download_failed"


class StorageFailed(AppError):
    """A file cannot be written: disk full, read-only, no permission."""

    exit_code, status, type, code = 11, 507, "server_error", "storage_failed"


def _all(base: type[AppError]) -> list[type[AppError]]:
    return [base, *(error for child in base.__subclasses__() for error in _all(child))]


BY_CODE: dict[str, type[AppError]] = {error.code: error for error in _all(AppError)}
