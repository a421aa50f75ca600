from __future__ import annotations

import pytest

from localllm.app.errors import AppError, ModelNotFound
from localllm.app.worker.faults import app_error, internal_error
from localllm.backends import BackendUnavailable
from localllm.engine import errors as engine


@pytest.mark.parametrize(
    ("error", "code", "numbers"),
    [
        (engine.ContextOverflow(30, 20, 25), "context_length_exceeded", {"n_prompt_tokens": 25, "n_ctx": 20}),
        (engine.CacheOverflow(30, 20), "cache_size_exceeded", {"n_needed": 30, "n_cache": 20}),
        (engine.RequestRefused("no"), "invalid_request", {}),
        (engine.ModelRefused("no", "because"), "model_unusable", {}),
        (BackendUnavailable("no", {}, "because"), "backend_unavailable", {}),
        (engine.RunnerFailed("lost"), "worker_died", {}),
        (engine.EngineError("the engine is closed"), "worker_died", {}),
        (ModelNotFound("no"), "model_not_found", {}),
    ],
)
def test_every_engine_error_has_an_app_error(error: Exception, code: str, numbers: dict[str, int]) -> None:
    reported = app_error(error)
    assert reported is not None
    assert (reported.code, reported.numbers) == (code, numbers)
    assert str(error) in reported.message
    assert reported.hint == "because" or "because" not in str(vars(error))


def test_other_exceptions_have_no_app_error() -> None:
    assert app_error(KeyError("the prompt")) is None
    assert type(internal_error()) is AppError
