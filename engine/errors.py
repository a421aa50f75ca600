"""What the engine refuses, and why. Every error carries the numbers a person needs to mend the request."""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors the engine raises on purpose."""


class RequestRefused(EngineError):
    """The request can never run on this engine; nothing was started."""


class ContextOverflow(RequestRefused):
    """Prompt (plus the tokens asked for) is longer than the model's context."""

    def __init__(self, needed: int, limit: int, prompt: int) -> None:
        self.needed, self.limit, self.prompt = needed, limit, prompt
        super().__init__(
            f"this model's maximum context length is {limit} tokens, but the request needs {needed} "
            f"({prompt} in the prompt and {needed - prompt} to generate)"
        )


class CacheOverflow(RequestRefused):
    """One request larger than all KV memory: preempting others would never make it fit."""

    def __init__(self, needed: int, limit: int) -> None:
        self.needed, self.limit = needed, limit
        super().__init__(f"the request needs KV memory for {needed} tokens, but all of it holds {limit}")


class ModelRefused(EngineError):
    """A model's files cannot be used: missing, corrupt, unsafe or of an unknown architecture."""

    def __init__(self, message: str, hint: str = "") -> None:
        self.hint = hint
        super().__init__(message)


class SettingRefused(EngineError):
    """A setting that only whoever computes can judge; the message names it."""

    def __init__(self, message: str, hint: str = "") -> None:
        self.hint = hint
        super().__init__(message)


class OutOfMemory(EngineError):
    """A step found too little memory on the device: nothing of it counts, what was computed before stands."""


class RunnerFailed(EngineError):
    """The backend failed while computing a step: the engine is closed and the requests named here are lost."""

    def __init__(self, message: str, request_ids: tuple[str, ...] = ()) -> None:
        self.request_ids = request_ids
        super().__init__(message)
