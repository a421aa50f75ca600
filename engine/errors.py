"""The errors of the engine. Their messages have the numbers that a user needs to mend the request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_SURROGATES = re.compile("[\ud800-\udfff]")


def encodable(text: str) -> str:
    """The text for JSON and other processes. Bytes of file names that are no UTF-8 become escapes such as \\xff."""
    return _SURROGATES.sub(lambda match: f"\\x{ord(match[0]) & 0xFF:02x}", text)


class EngineError(Exception):
    """Base class of the engine's errors."""


class RequestRefused(EngineError):
    """The request can never run on this engine. Nothing was started."""


class ContextOverflow(RequestRefused):
    """The prompt plus max_tokens exceeds the context of the model."""

    def __init__(self, needed: int, limit: int, prompt: int) -> None:
        self.needed = needed
        self.limit = limit
        self.prompt = prompt
        super().__init__(
            f"this model's maximum context length is {limit} tokens, but the request needs {needed} "
            f"({prompt} in the prompt and {needed - prompt} to generate)"
        )


class CacheOverflow(RequestRefused):
    """One request needs more than the whole KV cache, so preemption cannot help."""

    def __init__(self, needed: int, limit: int) -> None:
        self.needed = needed
        self.limit = limit
        super().__init__(f"the request needs {needed} tokens of KV cache, but the whole cache has {limit}")


class ModelRefused(EngineError):
    """Model files are missing, corrupt or unsafe, the architecture is unknown, or the model does not fit in memory.

    `numbers`: see ModelTooLarge; otherwise empty.
    """

    def __init__(self, message: str, hint: str = "", numbers: Mapping[str, int] = MappingProxyType({})) -> None:
        self.hint = hint
        self.numbers = numbers
        super().__init__(encodable(message))


class ModelTooLarge(ModelRefused):
    """The model does not fit in memory. `numbers` has the memory plan of the load, if there is one."""


class ContextRefused(ModelRefused):
    """The context in the options exceeds that of the model."""

    setting = "context"

    def __init__(self, model: str, context: int, limit: int, hint: str = "") -> None:
        """`limit`: tokens, of the model."""
        self.instead = limit
        super().__init__(f"{model} has a context of {limit} tokens, not {context}", hint)


class SettingRefused(EngineError):
    """A setting that this backend, device or model does not support. The message names it.

    `setting`: its field of LoadOptions; empty if it has none. `instead`: a value of this field that is supported; None:
    the default of LoadOptions.
    """

    def __init__(self, message: str, hint: str = "", *, setting: str = "", instead: Any = None) -> None:
        self.hint = hint
        self.setting = setting
        self.instead = instead
        super().__init__(encodable(message))


class OutOfMemory(EngineError):
    """The device ran out of memory in a step. The step has no results; earlier results stay valid."""


class RunnerFailed(EngineError):
    """The backend failed in a step. The engine is closed and the requests in `request_ids` end."""

    def __init__(self, message: str, request_ids: tuple[str, ...] = ()) -> None:
        self.request_ids = request_ids
        super().__init__(message)
