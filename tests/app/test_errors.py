"""Status, type and exit code of each error: clients and scripts depend on them."""

from __future__ import annotations

from localllm.app import errors

TABLE = {
    "internal_error": (500, "server_error", 1),
    "bad_configuration": (500, "server_error", 2),
    "invalid_request": (400, "invalid_request_error", 2),
    "unsupported_parameter": (400, "invalid_request_error", 2),
    "other_load_options": (409, "invalid_request_error", 2),
    "context_length_exceeded": (400, "invalid_request_error", 2),
    "embeddings_unsupported": (400, "invalid_request_error", 2),
    "cache_size_exceeded": (400, "invalid_request_error", 2),
    "chat_template_failed": (400, "invalid_request_error", 2),
    "wrong_kind": (400, "invalid_request_error", 5),
    "previous_response_not_found": (400, "invalid_request_error", 2),
    "invalid_api_key": (401, "authentication_error", 4),
    "forbidden": (403, "permission_error", 4),
    "model_not_found": (404, "not_found_error", 3),
    "adapter_not_found": (404, "not_found_error", 3),
    "route_not_found": (404, "not_found_error", 3),
    "response_not_found": (404, "not_found_error", 3),
    "response_cancelled": (409, "invalid_request_error", 1),
    "method_not_allowed": (405, "invalid_request_error", 2),
    "request_too_large": (413, "invalid_request_error", 2),
    "unsupported_media_type": (415, "invalid_request_error", 2),
    "model_unusable": (422, "invalid_request_error", 5),
    "adapter_unusable": (400, "invalid_request_error", 5),
    "backend_unavailable": (422, "invalid_request_error", 5),
    "server_overloaded": (429, "rate_limit_error", 6),
    "out_of_memory": (503, "server_error", 6),
    "server_stopping": (503, "server_error", 6),
    "worker_died": (500, "server_error", 7),
    "daemon_unreachable": (503, "server_error", 8),
    "port_taken": (503, "server_error", 9),
    "download_failed": (502, "server_error", 10),
    "storage_failed": (507, "server_error", 11),
    "install_failed": (500, "server_error", 5),
}


def test_every_error_has_its_codes() -> None:
    kinds = {code: kind for code, kind in errors.BY_CODE.items() if kind.__module__ == errors.__name__}
    assert {code: (kind.status, kind.type, kind.exit_code) for code, kind in kinds.items()} == TABLE


def test_error_has_hint_param_and_numbers() -> None:
    error = errors.ContextTooLong("too long", hint="less", param="messages", n_ctx=4)
    assert (str(error), error.message, error.hint, error.param, error.numbers) == (
        "too long",
        "too long",
        "less",
        "messages",
        {"n_ctx": 4},
    )
    assert (errors.AppError("x").hint, errors.AppError("x").param, errors.AppError("x").numbers) == ("", None, {})
