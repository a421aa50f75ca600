"""Every error of the app, with its exit code, HTTP status, type and code."""

from __future__ import annotations

from typing import ClassVar

from ..engine.errors import encodable


class AppError(Exception):
    """An error with a message and, if possible, a hint: how the user can solve the problem.

    `exit_code` is the exit code of the command line. `status`, `type` and `code` are for HTTP (OpenAI's error body).
    `param` is the name of the invalid parameter. `numbers` are additional fields of the error body.
    """

    exit_code: ClassVar[int] = 1
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init_subclass__(cls, *, code: str, exit_code: int = 0, status: int = 0, type: str = "") -> None:
        """Set the exit code, status, type and code of a subclass. Missing values are inherited from the base class."""
        cls.code = code
        cls.exit_code = exit_code or cls.exit_code
        cls.status = status or cls.status
        cls.type = type or cls.type

    def __init__(self, message: str, *, hint: str = "", param: str | None = None, **numbers: int) -> None:
        super().__init__(message)
        self.message = encodable(message)
        self.hint = encodable(hint)
        self.param = param
        self.numbers = numbers


class ConfigError(AppError, exit_code=2, status=500, type="server_error", code="bad_configuration"):
    pass


class InvalidRequest(AppError, exit_code=2, status=400, type="invalid_request_error", code="invalid_request"):
    pass


class UnsupportedParameter(InvalidRequest, code="unsupported_parameter"):
    pass


class OtherOptions(InvalidRequest, status=409, code="other_load_options"):
    """The model answers requests, and was loaded with other options than this request needs."""


class ContextTooLong(InvalidRequest, code="context_length_exceeded"):
    pass


class CacheTooSmall(InvalidRequest, code="cache_size_exceeded"):
    pass


class EmbeddingsUnsupported(InvalidRequest, code="embeddings_unsupported"):
    """The model is no embedding model, or its pooling is not supported."""

    @classmethod
    def without_pooling(cls, model: str) -> EmbeddingsUnsupported:
        """The error for a model whose files describe no pooling."""
        return cls(
            f"{model} is no embedding model: its files describe no pooling (modules.json of sentence-transformers, or "
            "pooling_type in a GGUF file)",
            hint="use an embedding model, such as Qwen/Qwen3-Embedding-0.6B",
            param="model",
        )


class WrongKind(InvalidRequest, exit_code=5, code="wrong_kind"):
    """The name selects the wrong kind of files: an adapter instead of a model, or a base model for a chat."""


class TemplateFailed(InvalidRequest, code="chat_template_failed"):
    pass


class Unauthorized(AppError, exit_code=4, status=401, type="authentication_error", code="invalid_api_key"):
    pass


class Forbidden(AppError, exit_code=4, status=403, type="permission_error", code="forbidden"):
    pass


class ModelNotFound(AppError, exit_code=3, status=404, type="not_found_error", code="model_not_found"):
    pass


class AdapterNotFound(AppError, exit_code=3, status=404, type="not_found_error", code="adapter_not_found"):
    pass


class ResponseNotFound(AppError, exit_code=3, status=404, type="not_found_error", code="response_not_found"):
    pass


class PreviousNotFound(InvalidRequest, code="previous_response_not_found"):
    """A request continues a response that is not stored."""


class Cancelled(AppError, exit_code=1, status=409, type="invalid_request_error", code="response_cancelled"):
    """A client has cancelled the answer."""


class RouteNotFound(AppError, exit_code=3, status=404, type="not_found_error", code="route_not_found"):
    pass


class MethodNotAllowed(AppError, exit_code=2, status=405, type="invalid_request_error", code="method_not_allowed"):
    pass


class BodyTooLarge(AppError, exit_code=2, status=413, type="invalid_request_error", code="request_too_large"):
    pass


class UnsupportedMedia(AppError, exit_code=2, status=415, type="invalid_request_error", code="unsupported_media_type"):
    """The request body is not plain JSON: another content type, or compressed."""


class ModelUnusable(AppError, exit_code=5, status=422, type="invalid_request_error", code="model_unusable"):
    """Model files are missing, corrupt or unsafe, or the architecture is unknown."""


class AdapterUnusable(AppError, exit_code=5, status=400, type="invalid_request_error", code="adapter_unusable"):
    """Adapter files are missing, corrupt or unsafe, do not fit the model, or the backend loads no adapters."""


class NoBackend(AppError, exit_code=5, status=422, type="invalid_request_error", code="backend_unavailable"):
    pass


class Overloaded(AppError, exit_code=6, status=429, type="rate_limit_error", code="server_overloaded"):
    pass


class OutOfMemory(AppError, exit_code=6, status=503, type="server_error", code="out_of_memory"):
    """The device ran out of memory in a step. The requests of that step end; all others continue."""


class Stopping(AppError, exit_code=6, status=503, type="server_error", code="server_stopping"):
    pass


class WorkerDied(AppError, exit_code=7, status=500, type="server_error", code="worker_died"):
    """The worker process ended. Its requests end; the next request starts a new process."""


class InstallFailed(AppError, exit_code=5, status=500, type="server_error", code="install_failed"):
    """The command that installs a package has failed. The hint has the last lines of its output."""


class DaemonUnreachable(AppError, exit_code=8, status=503, type="server_error", code="daemon_unreachable"):
    pass


class PortTaken(AppError, exit_code=9, status=503, type="server_error", code="port_taken"):
    pass


class DownloadFailed(AppError, exit_code=10, status=502, type="server_error", code="download_failed"):
    pass


class StorageFailed(AppError, exit_code=11, status=507, type="server_error", code="storage_failed"):
    """A file cannot be written: disk full, read-only, no permission."""


def _all(base: type[AppError]) -> list[type[AppError]]:
    return [base, *(error for child in base.__subclasses__() for error in _all(child))]


BY_CODE: dict[str, type[AppError]] = {error.code: error for error in _all(AppError)}
