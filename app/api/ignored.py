"""The fields that cannot change the answer of a local model: one policy for all routes.

They are accepted, and a header of the response names those that ask for something. With the setting `strict_fields` a
request that has one is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ..errors import UnsupportedParameter
from .body import WireBody

HEADER = "x-localllm-ignored"
# Ollama's options of the load of a model.
LOAD_OPTIONS = (
    "draft_num_predict embedding_only f16_kv logits_all low_vram main_gpu num_batch num_ctx num_gpu num_thread numa "
    "use_mlock use_mmap vocab_only"
).split()


@dataclass(frozen=True, slots=True)
class Ignored:
    """The reason why a field has no effect, and the values that ask for nothing: the daemon does what they say."""

    reason: str
    neutral: tuple[object, ...] = ()


_CACHE = "All requests share the prefix cache."
_LABEL = "A label for the accounts of a provider."
_STORED = "Answers are not stored."
_LOADED = "The settings decide how a model is loaded."
_OFF = "The sampler of this parameter is off."

# Path of a field -> why it is ignored. A path goes through objects and all items of lists.
IGNORED: Mapping[str, Ignored] = {
    "cache_control": Ignored(_CACHE),
    "cache_prompt": Ignored(_CACHE, (True,)),
    "client_metadata": Ignored(_LABEL),
    "context_management": Ignored("The daemon removes nothing from the messages."),
    "diagnostics": Ignored("The daemon reports no misses of the prefix cache."),
    "dry_allowed_length": Ignored(_OFF),
    "dry_base": Ignored(_OFF),
    "dry_penalty_last_n": Ignored(_OFF),
    "dry_sequence_breakers": Ignored(_OFF),
    "dynatemp_exponent": Ignored(_OFF),
    "id_slot": Ignored("The scheduler assigns the slots.", (-1,)),
    "max_tool_calls": Ignored("It counts only calls of tools that the server runs."),
    "messages.cache_control": Ignored(_CACHE),
    "messages.content.cache_control": Ignored(_CACHE),
    "messages.content.prompt_cache_breakpoint": Ignored(_CACHE),
    "metadata": Ignored(_LABEL),
    "mirostat_eta": Ignored(_OFF),
    "mirostat_tau": Ignored(_OFF),
    **{f"options.{name}": Ignored(_LOADED) for name in LOAD_OPTIONS},
    "options.mirostat_eta": Ignored(_OFF),
    "options.mirostat_tau": Ignored(_OFF),
    "options.num_keep": Ignored("A conversation is never cut."),
    "priority": Ignored("Requests run in the order in which they arrive.", (0,)),
    "prompt_cache_key": Ignored(_CACHE),
    "prompt_cache_options": Ignored(_CACHE),
    "prompt_cache_retention": Ignored(_CACHE),
    "reasoning.generate_summary": Ignored("The reasoning is shown as it is."),
    "reasoning.summary": Ignored("The reasoning is shown as it is."),
    "safety_identifier": Ignored(_LABEL),
    "samplers": Ignored("The order of the samplers is fixed."),
    "service_tier": Ignored("There is one tier.", ("auto", "default", "standard_only")),
    "store": Ignored(_STORED, (False,)),
    "stream_options.include_obfuscation": Ignored("Events have no padding.", (False,)),
    "system.cache_control": Ignored(_CACHE),
    "thinking.budget_tokens": Ignored("The model ends its reasoning itself."),
    "thinking.display": Ignored("The reasoning is shown as it is."),
    "t_max_predict_ms": Ignored("An answer has a limit of tokens, not of time."),
    "t_max_prompt_ms": Ignored("A prompt has a limit of tokens, not of time."),
    "tools.cache_control": Ignored(_CACHE),
    "tools.web_search": Ignored("The daemon has no web search. The model does not get the tool."),
    "user": Ignored(_LABEL),
    "xtc_threshold": Ignored(_OFF),
}

# Fields that the chat template may have a switch for. The worker knows the template; without a switch they are ignored.
BY_TEMPLATE: Mapping[str, str] = {
    "chat_template_kwargs": "A variable that the template does not have.",
    "enable_thinking": "The template has no switch for reasoning.",
    "output_config": "The template has no switch for reasoning.",
    "reasoning": "The template has no switch for reasoning.",
    "reasoning_effort": "The template has no switch for reasoning.",
    "text": "The template has no switch for the length of answers.",
    "think": "The template has no switch for reasoning.",
    "thinking": "The template has no switch for reasoning.",
    "verbosity": "The template has no switch for the length of answers.",
}


def table() -> dict[str, str]:
    """The path of each field, and the reason why it has no effect, for people."""
    rows = {path: field.reason for path, field in IGNORED.items()} | dict(BY_TEMPLATE)
    return {path: rows[path] for path in sorted(rows)}


def ignored_in(body: WireBody) -> tuple[str, ...]:
    """The paths of the fields in a body that have no effect, in the order of the table."""
    return tuple(
        path
        for path, field in IGNORED.items()
        if any(value is not None and value not in field.neutral for value in _values(body, path.split(".")))
    )


class Policy:
    """The ignored fields of one request, as they become known."""

    def __init__(self, strict: bool) -> None:
        """`strict`: the setting `strict_fields`."""
        self._strict = strict
        self._names: list[str] = []

    def add(self, names: Iterable[str]) -> None:
        """Raises UnsupportedParameter for the first of the names if the policy is strict."""
        for name in names:
            if self._strict:
                reason = IGNORED[name].reason if name in IGNORED else BY_TEMPLATE[name.partition(".")[0]]
                hint = "the setting strict_fields refuses such fields"
                raise UnsupportedParameter(f"{name} has no effect. {reason}", hint=hint, param=name)
            self._names.append(name)

    @property
    def headers(self) -> dict[str, str]:
        """The header that names the fields; empty without one."""
        return {HEADER: ", ".join(self._names)} if self._names else {}


def _values(value: object, names: Sequence[str]) -> Iterator[object]:
    """The values at a path of fields below a value."""
    if isinstance(value, list) and names:
        for item in value:
            yield from _values(item, names)
    elif not names:
        yield value
    elif isinstance(value, msgspec.Struct) and (child := getattr(value, names[0], None)) is not None:
        yield from _values(child, names[1:])
