"""Prepares a Generate frame for the engine, and converts the deltas of its choices to frames."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...engine.request import Delta, Request
from ..chat.answer import Choice
from ..chat.grammar import TokenGrammar
from ..chat.prompt import Prompt, too_long
from ..chat.sampling import check_token_ids, sampling_of
from ..errors import InvalidRequest, OutOfMemory, UnsupportedParameter
from ..frames import Finished, Generate, Piece
from .opening import OpenModel


@dataclass(slots=True)
class Generation:
    """A prepared request and its choices. Each choice is one request of the engine, with its own id."""

    asked: Generate
    prompt: Prompt
    requests: list[Request]
    choices: dict[str, Choice]  # by id of the engine's request

    @property
    def live(self) -> list[str]:
        """Ids of the engine's requests that may still run."""
        return [name for name, choice in self.choices.items() if not choice.done]

    def echo(self, text: str) -> list[Piece]:
        return [choice.echo(text) for choice in self.choices.values()]

    def take(self, delta: Delta) -> Piece | None:
        """The new output of one choice. Raises InvalidRequest if the request failed, OutOfMemory if the step did."""
        if delta.finish == "failed":
            raise InvalidRequest(f"the answer was stopped: {delta.error}")
        if delta.finish == "no_memory":
            raise OutOfMemory(
                f"the answer was stopped: {delta.error}",
                hint="try again; a smaller KV cache leaves more memory for steps (settings cache_share and cache_mib)",
            )
        return self.choices[delta.request_id].take(delta)

    def finished(self, *, cancelled: bool = False) -> Finished:
        """The last frame. Its prompt tokens count once; the cached tokens are the minimum over the choices."""
        return Finished(
            id=self.asked.id,
            prompt_tokens=len(self.prompt.ids),
            completion_tokens=sum(choice.generated for choice in self.choices.values()),
            cached_tokens=min(choice.cached for choice in self.choices.values()),
            cancelled=cancelled,
        )


def prepare(asked: Generate, model: OpenModel) -> Generation:
    """Render, tokenize, check and compile: all work before the engine. Blocks; raises AppError."""
    tools, forced = _tools(asked)
    if asked.adapter is not None:
        raise UnsupportedParameter("adapter: adapters are not supported in this version", param="adapter")
    if asked.echo and (asked.prompt is None or asked.logprobs is not None):
        raise UnsupportedParameter("echo needs a plain prompt, without logprobs", param="echo")
    if asked.response_format is not None and tools:
        raise UnsupportedParameter("response_format cannot be combined with tools", param="response_format")
    prompt = _prompt(asked, model, tools, close_reasoning=asked.response_format is not None or bool(forced))
    spec = model.runner.spec
    where = "messages" if asked.prompt is None else "prompt"
    check_token_ids(where, prompt.ids, spec.vocab_size)
    check_token_ids("stop_token_ids", asked.stop_ids, spec.vocab_size)
    max_tokens = asked.max_tokens
    if max_tokens is None:
        max_tokens = spec.max_length - len(prompt.ids)
        if max_tokens < 1:
            raise too_long(spec.max_context, len(prompt.ids), where)
    stop_ids = frozenset(asked.stop_ids) | (frozenset() if asked.ignore_eos else model.tokenizer.eos_ids)
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    compiled = _grammar(asked, model, prompt, tools, forced)
    if asked.response_format is not None:
        prompt = replace(prompt, continues_text=True)  # keep the first space: a regex may require it
    generation = Generation(asked, prompt, [], {})
    for index in range(asked.n):
        name = f"{asked.id}/{index}"
        grammar = compiled.copy() if compiled else None
        sampling = sampling_of(asked, model.recommended, seed=seed + index, vocab_size=spec.vocab_size)
        try:
            request = Request(name, prompt.ids, max_tokens, sampling, stop_ids, grammar=grammar)
        except ValueError as error:
            raise InvalidRequest(str(error), param="max_tokens" if "max_tokens" in str(error) else where) from None
        generation.requests.append(request)
        generation.choices[name] = Choice(
            asked.id,
            index,
            model.tokenizer,
            prompt,
            stop=asked.stop,
            stop_ids=stop_ids,
            parallel_tool_calls=asked.parallel_tool_calls,
        )
    return generation


def _prompt(asked: Generate, model: OpenModel, tools: Sequence[dict[str, Any]], *, close_reasoning: bool) -> Prompt:
    context = model.runner.spec.max_context
    if asked.prompt is not None:
        return model.prompts.from_text(asked.prompt, context=context)
    return model.prompts.from_messages(
        asked.messages or [],
        tools=tools,
        kwargs=asked.template_kwargs,
        continue_final_message=asked.continue_final_message,
        close_reasoning=close_reasoning,
        context=context,
    )


def _tools(asked: Generate) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The tools for the prompt, and the tools of which the model must call one."""
    tools = asked.tools or []
    names = [tool.get("function", {}).get("name") for tool in tools]
    for index, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"tools[{index}].function.name is missing", param=f"tools[{index}].function.name")
    match asked.tool_choice:
        case "none":
            return [], []
        case "auto":
            return tools, []
        case "required" if tools:
            return tools, tools
        case {"function": {"name": str(wanted)}} if wanted in names:
            return tools, [tools[names.index(wanted)]]
    raise InvalidRequest(f"tool_choice {asked.tool_choice!r:.100} is not a tool of this request", param="tool_choice")


def _grammar(
    asked: Generate,
    model: OpenModel,
    prompt: Prompt,
    tools: Sequence[dict[str, Any]],
    forced: Sequence[dict[str, Any]],
) -> TokenGrammar | None:
    if forced:
        return model.grammars().compile_tool_calls(forced, parallel=asked.parallel_tool_calls)
    strict = [index for index, tool in enumerate(tools) if tool["function"].get("strict")]
    if strict and not prompt.tools:
        where = f"tools[{strict[0]}].function.strict"
        raise UnsupportedParameter(
            f"{where}: not supported for this model: its tool-call format cannot be constrained by a schema",
            param=where,
        )
    if strict:
        return model.grammars().compile_text_with_calls(tools)
    if asked.response_format is not None:
        return model.grammars().compile(asked.response_format)
    return None
