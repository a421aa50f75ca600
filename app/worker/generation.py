"""Prepares a Generate frame for the engine, and converts the deltas of its choices to frames."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from functools import partial

from ...engine.grammar import Grammar
from ...engine.request import Delta, Request
from ..chat.answer import Choice, MarkedReader, ReadingOptions
from ..chat.calls.constraint import LazyGrammar
from ..chat.infill import Infill, infill_prompt
from ..chat.prompt import Prompt, too_long
from ..chat.sampling import check_token_ids, sampling_of
from ..chat.tokenizer.base import Tokenizer
from ..errors import AppError, InvalidRequest, UnsupportedParameter
from ..frames import Finished, Generate, Piece
from ..grammar.compiler import TokenGrammar
from ..grammar.lengths import Beginning, MinimumLength
from ..purpose import check_use
from .faults import check_finish
from .opening import OpenModel


@dataclass(slots=True)
class Generation:
    """A prepared request and its choices. Each choice is one request of the engine, with its own id."""

    frame: Generate
    prompt: Prompt
    requests: list[Request]
    choices: dict[str, Choice]  # id of the engine's request → choice
    repeated: int = 0  # tokens of the prompt that each choice repeats as its first tokens

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt.ids)

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.prompt.warnings

    @property
    def ignored(self) -> tuple[str, ...]:
        return self.prompt.ignored

    @property
    def has_ended(self) -> bool:
        """Whether no choice may still run."""
        return all(choice.done for choice in self.choices.values())

    def is_done(self, request_id: str) -> bool:
        """Whether the choice of a request of the engine has ended."""
        return self.choices[request_id].done

    def opening(self, tokenizer: Tokenizer) -> list[Piece]:
        """The first output: with `echo`, one piece with the prompt for each choice."""
        if not self.frame.echo:
            return []
        if self.frame.logprobs is not None:
            return [choice.first(self.prompt.ids[0]) for choice in self.choices.values()]
        text = self.frame.prompt if isinstance(self.frame.prompt, str) else tokenizer.decode(self.prompt.ids)
        return [choice.echo(text) for choice in self.choices.values()]

    def take(self, delta: Delta) -> Piece | None:
        """The new output of one choice; None if it has none yet. Raises the errors of check_finish."""
        check_finish(delta)
        return self.choices[delta.request_id].take(delta)

    def finished(self, *, cancelled: bool = False) -> Finished:
        """The last frame. The prompt counts once; `cached_tokens` is the minimum over the choices."""
        return Finished(
            id=self.frame.id,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=sum(max(choice.generated - self.repeated, 0) for choice in self.choices.values()),
            cached_tokens=min(choice.cached for choice in self.choices.values()),
            cancelled=cancelled,
        )


def prepare(frame: Generate, model: OpenModel) -> Generation:
    """Prepare a request for the engine: render, tokenize, check, compile the grammar. Blocks; raises AppError."""
    if frame.response_format is not None and frame.tools:
        raise UnsupportedParameter("response_format cannot be combined with tools", param="response_format")
    prompt = prompt_of(frame, model)
    spec = model.runner.spec
    check_token_ids(_source(frame), prompt.ids, spec.vocab_size)
    check_token_ids("stop_token_ids", frame.stop_ids, spec.vocab_size)
    max_tokens = _max_tokens(frame, model, prompt)
    stop_ids = frozenset(frame.stop_ids) | (_ends(frame, model) if not frame.ignore_eos else frozenset())
    compiled = _with_minimum(frame, _grammar(frame, model, prompt), stop_ids, spec.vocab_size)
    if frame.response_format is not None:
        prompt = replace(prompt, continues_text=True)  # keep the first space: a regex may require it
    new_id = prompt.call_ids.new
    options = ReadingOptions(frame.stop, frame.tools, one_call=not _is_parallel(frame, prompt), new_id=new_id)
    seed = secrets.randbits(63) if frame.seed is None else frame.seed
    sampling = sampling_of(frame, model.recommended, model.suppressed, seed=seed, vocab_size=spec.vocab_size)
    given = _given(frame, prompt, stop_ids)
    if given:
        compiled = Beginning(given, spec.vocab_size, compiled)
    own_prompt = replace(prompt, ids=prompt.ids[: len(prompt.ids) - len(given)])
    request = _request(frame, own_prompt, max_tokens + len(given), stop_ids)
    generation = Generation(frame, prompt, [], {}, repeated=len(given))
    for index in range(frame.n):
        name = f"{frame.id}/{index}"
        own = replace(sampling, seed=(seed + index) % 2**64)
        grammar = compiled.copy() if compiled else None
        generation.requests.append(replace(request, id=name, sampling=own, grammar=grammar))
        generation.choices[name] = Choice(frame.id, index, model.tokenizer, own_prompt, options, stop_ids=stop_ids)
    return generation


def _ends(frame: Generate, model: OpenModel) -> frozenset[int]:
    """The tokens of the model that end an answer."""
    ends = model.tokenizer.eos_ids
    return ends if frame.suffix is None else ends | _infill(frame, model).ends


def _infill(frame: Generate, model: OpenModel) -> Infill:
    assert isinstance(frame.prompt, str)
    return infill_prompt(model.tokenizer, frame.prompt, frame.suffix or "")


def _given(frame: Generate, prompt: Prompt, stop_ids: frozenset[int]) -> tuple[int, ...]:
    """The tokens of the prompt that the model repeats, so that they have log-probabilities: all but the first one.

    Raises InvalidRequest if the answer would end among them.
    """
    if not frame.echo or frame.logprobs is None:
        return ()
    given = prompt.ids[1:]
    if not given and not frame.max_tokens:
        raise InvalidRequest("max_tokens: a prompt of one token has no log-probabilities", param="max_tokens")
    if not stop_ids.isdisjoint(given):
        raise InvalidRequest(
            "logprobs: the prompt has a token that ends answers, so its log-probabilities cannot be computed",
            hint="use ignore_eos, or leave the token out",
            param="logprobs",
        )
    return given


def _source(frame: Generate) -> str:
    """The parameter that has the prompt."""
    return "messages" if frame.prompt is None else "prompt"


def prompt_of(frame: Generate, model: OpenModel) -> Prompt:
    """The prompt of a request. Blocks; raises AppError."""
    check_use(model.info.model, model.info.purpose, "chat" if frame.prompt is None else "text")
    context = model.runner.spec.max_context
    if frame.suffix is not None:
        return Prompt(_infill(frame, model).ids, continues_text=True)
    if frame.prompt is not None:
        return model.prompts.from_text(frame.prompt, context=context)
    return model.prompts.from_messages(
        frame.messages or [],
        tools=frame.tools,
        kwargs=frame.template_kwargs,
        reasoning=frame.reasoning,
        verbosity=frame.verbosity,
        continue_final_message=frame.continue_final_message,
        close_reasoning=frame.response_format is not None or bool(frame.forced_tools),
        context=context,
    )


def _max_tokens(frame: Generate, model: OpenModel, prompt: Prompt) -> int:
    """The limit of the answer in tokens: the limit of the request, or the rest of the context."""
    if frame.max_tokens is not None and not frame.fit_max_tokens:
        return frame.max_tokens
    spec = model.runner.spec
    rest = spec.max_length - len(prompt.ids)
    if rest < 1:
        raise too_long(spec.max_context, len(prompt.ids), _source(frame))
    return rest if frame.max_tokens is None else min(rest, frame.max_tokens)


def _request(frame: Generate, prompt: Prompt, max_tokens: int, stop_ids: frozenset[int]) -> Request:
    """The parts that all choices have in common. Raises InvalidRequest."""
    try:
        return Request(frame.id, prompt.ids, max_tokens, stop_ids=stop_ids)
    except ValueError as error:
        param = "max_tokens" if "max_tokens" in str(error) else _source(frame)
        raise InvalidRequest(str(error), param=param) from None


def _grammar(frame: Generate, model: OpenModel, prompt: Prompt) -> Grammar | None:
    """The grammar of the answer; None if the answer is free text."""
    if frame.response_format is not None:
        return model.grammars().compile(frame.response_format)
    if not frame.tools:
        return None
    if prompt.harmony:
        return _harmony_grammar(frame, model, prompt) if frame.forced_tools or _has_strict_tool(frame) else None
    if frame.forced_tools:
        parallel = _is_parallel(frame, prompt)
        return model.grammars().compile_forced_calls(prompt.form.calls[0], frame.forced_tools, parallel=parallel)
    return _optional_calls(frame, model, prompt)


def _with_minimum(frame: Generate, grammar: Grammar | None, ends: frozenset[int], vocab_size: int) -> Grammar | None:
    """The grammar with the minimum length of the frame. Raises InvalidRequest, or UnsupportedParameter."""
    if not frame.min_tokens:
        return grammar
    if frame.response_format is not None or frame.forced_tools:
        raise UnsupportedParameter("min_tokens: the format of the answer says where it ends", param="min_tokens")
    if frame.max_tokens is not None and frame.min_tokens > frame.max_tokens:
        raise InvalidRequest(f"min_tokens exceeds max_tokens, {frame.max_tokens}", param="min_tokens")
    return MinimumLength(frame.min_tokens, (token for token in ends if token < vocab_size), vocab_size, grammar)


def _optional_calls(frame: Generate, model: OpenModel, prompt: Prompt) -> LazyGrammar | None:
    """The grammar of an answer that may have calls. Without strict tools, calls may also be free: if the format is a
    guess, or if grammars do not support the tokenizer."""
    is_strict = _has_strict_tool(frame)
    if not is_strict and not prompt.certain_calls:
        return None
    parallel = _is_parallel(frame, prompt)
    try:
        grammars = model.grammars().compile_optional_calls(prompt.form.calls[0], frame.tools, parallel=parallel)
    except AppError:
        if is_strict:
            raise
        return None
    return LazyGrammar(
        grammars,
        partial(MarkedReader, model.tokenizer, prompt, ReadingOptions(tools=frame.tools)),
        lambda text: model.tokenizer.encode(text, add_special_tokens=False),
    )


def _has_strict_tool(frame: Generate) -> bool:
    return any(tool["function"].get("strict") for tool in frame.tools)


def _is_parallel(frame: Generate, prompt: Prompt) -> bool:
    """Whether the answer may have several calls. Some templates cannot render several calls of an earlier message."""
    return frame.parallel_tool_calls and prompt.parallel_calls


def _harmony_grammar(frame: Generate, model: OpenModel, prompt: Prompt) -> TokenGrammar:
    """The grammar of an answer with forced or strict tools, in the format of chat/output/harmony.py."""
    if prompt.inside_answer:  # the grammar begins with a header
        raise UnsupportedParameter(
            "continue_final_message: not supported with forced or strict tools for this model",
            param="continue_final_message",
        )
    forced = bool(frame.forced_tools)
    return model.grammars().compile_harmony_calls(frame.forced_tools or frame.tools, forced=forced)
