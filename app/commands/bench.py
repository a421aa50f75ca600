"""`localllm bench`: the speed of a model, measured through the daemon's API."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import click

from ...backends import load
from .. import config
from ..client import Client, Done, LoadedModel, LoadFlags
from ..errors import AppError, InvalidRequest
from .console import print_json, say
from .session import loaded_client

LONG = 400  # words in a prompt that measures prefill
SHORT = 24  # words in a prompt that measures decode
NEW_TOKENS = 96
WORDS = "time water house morning letter road music table winter colour bread window river paper summer garden".split()
MARGIN = 1.2  # upper bound of a prompt's tokens, divided by the mean for as many words


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the requests of a benchmark."""

    long: int = LONG  # words
    short: int = SHORT  # words
    new_tokens: int = NEW_TOKENS


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a benchmark: medians of several rounds. Rates are in tokens per second."""

    model: str
    backend: str
    device: str
    dtype: str
    quant: str
    rounds: int
    prompt_tokens: int
    ttft_ms: float  # time to first token of a short prompt
    prefill: float  # prefill rate with a long prompt
    decode: float  # decode rate of one answer
    throughput: dict[int, float]  # number of parallel answers -> decode rate of all answers together
    memory_gbps: float | None = None  # read bandwidth of the device memory; None: unknown
    memory_share: float | None = None  # fraction of memory_gbps that decode uses; > 1: the CPU cache holds the weights
    warnings: tuple[str, ...] = ()  # for the user, for example that the CUDA kernels are not built


def bench(model: str | None, rounds: int, together: Sequence[int], load_flags: Mapping[str, Any], as_json: bool) -> int:
    """Print the results. `together` lists the numbers of parallel answers to measure."""
    settings = config.load()
    model = model or settings.model
    session = loaded_client(settings, model, LoadFlags(**load_flags))
    result = asyncio.run(_bench(session, model, rounds, together))
    if as_json:
        print_json(asdict(result))
    else:
        _print(result)
    return 0


def _print(result: Result) -> None:
    formats = ", ".join(filter(None, (result.backend, result.dtype, result.quant)))
    click.echo(f"{result.model} on {result.device} ({formats}), medians of {result.rounds} rounds")
    click.echo(f"  time to first token  {result.ttft_ms:10.1f} ms")
    click.echo(f"  prefill              {result.prefill:10.1f} tokens/s, {result.prompt_tokens} tokens")
    click.echo(f"  decode, 1 answer     {result.decode:10.1f} tokens/s")
    for count, rate in result.throughput.items():
        click.echo(f"  {f'decode, {count} answers':21}{rate:10.1f} tokens/s in total")
    if result.memory_gbps is not None and result.memory_share is not None:
        share = f"decode with 1 answer uses {result.memory_share:.0%}"
        click.echo(f"  memory               {result.memory_gbps:10.1f} GB/s read bandwidth; {share}")
    for warning in result.warnings:
        click.echo(f"  warning              {warning}")


async def _bench(
    session: AbstractAsyncContextManager[Client], model: str, rounds: int, together: Sequence[int]
) -> Result:
    async with session as client:
        info = await client.load(model)  # returns the properties of the loaded model
        words = random.Random(0)
        [probe] = await _answers(client, model, [" ".join(WORDS)], 1)
        sizes = _sizes(info.context, probe.usage.prompt_tokens / len(WORDS))
        await _answers(client, model, [_prompt(words, sizes.short)], sizes.new_tokens)  # warm-up; not measured
        prefills = []
        decodes = []
        rates: dict[int, list[float]] = {count: [] for count in together}
        for number in range(1, rounds + 1):
            say(f"round {number} of {rounds}")
            prefills += await _answers(client, model, [_prompt(words, sizes.long)], 1)
            decodes += await _answers(client, model, [_prompt(words, sizes.short)], sizes.new_tokens)
            for count, results in rates.items():
                prompts = [_prompt(words, sizes.short) for _ in range(count)]
                results.append(_rate(await _answers(client, model, prompts, sizes.new_tokens)))
    decode = median(answer.tokens_per_second for answer in decodes)
    bandwidth, share = _memory(info, decode)
    return Result(
        model=model,
        backend=info.backend,
        device=info.device,
        dtype=info.dtype,
        quant=info.quant,
        rounds=rounds,
        prompt_tokens=round(median(answer.usage.prompt_tokens for answer in prefills)),
        ttft_ms=1e3 * median(answer.ttft for answer in decodes),
        prefill=median((a.usage.prompt_tokens - a.usage.cached_tokens) / a.ttft for a in prefills),
        decode=decode,
        throughput=dict(zip(rates, map(median, rates.values()), strict=True)),
        memory_gbps=bandwidth,
        memory_share=share,
        warnings=info.warnings,
    )


def _sizes(context: int, word_tokens: float) -> Sizes:
    """The usual sizes, or smaller ones that fit the context. `word_tokens`: mean number of tokens of a word.

    Raises InvalidRequest if a context is too short for any measurement.
    """
    if not context:  # unknown
        return Sizes()
    words = int((context - 1) / (MARGIN * word_tokens))  # in the longest prompt, without the token of its answer
    short = min(SHORT, words // 2)
    new_tokens = min(NEW_TOKENS, context - int(short * MARGIN * word_tokens) - 1)
    if short < 1:
        message = f"a context of {context} tokens is too short for a benchmark"
        raise InvalidRequest(message, hint="raise the setting context")
    return Sizes(min(LONG, words), short, new_tokens)


def _prompt(words: random.Random, count: int) -> str:
    """A random text of `count` words. No two prompts are equal, so there is no prefix hit."""
    return " ".join(words.choice(WORDS) for _ in range(count))


async def _answers(client: Client, model: str, prompts: list[str], tokens: int) -> list[Done]:
    return list(await asyncio.gather(*(_answer(client, model, prompt, tokens) for prompt in prompts)))


async def _answer(client: Client, model: str, prompt: str, tokens: int) -> Done:
    async with aclosing(client.complete(model, prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True)) as events:
        async for event in events:
            if isinstance(event, Done):
                return event
    raise AppError("the daemon ended the answer without a final event")


def _rate(answers: list[Done]) -> float:
    """Decode rate of parallel answers: their tokens after the first, divided by the time after the first token."""
    tokens = sum(answer.usage.completion_tokens - 1 for answer in answers)
    return tokens / (max(answer.seconds for answer in answers) - min(answer.ttft for answer in answers))


def _memory(info: LoadedModel, decode: float) -> tuple[float | None, float | None]:
    """(read bandwidth of the device memory in GB/s, fraction of this bandwidth that decode uses); None: unknown."""
    if not info.token_bytes:
        return None, None
    say("measuring the read bandwidth of the memory")
    bandwidth = load(info.backend).read_bandwidth()
    if bandwidth is None:
        return None, None
    return bandwidth / 1e9, info.token_bytes * decode / bandwidth
