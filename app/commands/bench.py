"""`localllm bench`: how fast a model answers here, measured through the daemon as any program would see it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import asdict, dataclass
from statistics import median

import click

from ...backends import load
from .. import config
from ..client import Client, Done, LoadedModel
from ..errors import AppError
from .asking import loaded
from .console import say

LONG, SHORT = 400, 24  # words in a prompt that measures reading, and in one that measures writing
NEW_TOKENS = 96
WORDS = "time water house morning letter road music table winter colour bread window river paper summer garden".split()


@dataclass(frozen=True, slots=True)
class Result:
    """Medians over the rounds. Rates are tokens per second."""

    model: str
    backend: str
    device: str
    dtype: str
    quant: str
    rounds: int
    prompt_tokens: int
    ttft_ms: float  # of a short prompt
    prefill: float  # of the long prompt
    decode: float  # one answer alone
    throughput: dict[int, float]  # answers at once -> all their tokens
    memory_gbps: float | None = None  # what the memory that the model computes from can be read at, where it is known
    memory_share: float | None = None  # of that, what decoding alone reads the weights at; over 1: they stay in cache
    warnings: tuple[str, ...] = ()  # shown to the user, e.g. that the CUDA kernels are not built


def bench(
    model: str | None, rounds: int, together: Sequence[int], backend: str | None, quant: str | None, as_json: bool
) -> int:
    """Print the figures; `together` is how many answers are asked for at once, one after the other."""
    settings = config.load()
    model = model or settings.model
    result = asyncio.run(_bench(loaded(settings, model, backend, quant), model, rounds, together))
    if as_json:
        click.echo(json.dumps(asdict(result), indent=2))
        return 0
    click.echo(
        f"{result.model} on {result.device} ({', '.join(filter(None, (result.backend, result.dtype, result.quant)))}), "
        f"medians of {result.rounds} rounds"
    )
    click.echo(f"  time to first token  {result.ttft_ms:10.1f} ms")
    click.echo(f"  reading the prompt   {result.prefill:10.1f} tokens/s, {result.prompt_tokens} tokens")
    click.echo(f"  writing alone        {result.decode:10.1f} tokens/s")
    for count, rate in result.throughput.items():
        click.echo(f"  writing, {f'{count} at once':12}{rate:10.1f} tokens/s in all")
    if result.memory_gbps is not None and result.memory_share is not None:
        share = f"writing alone reads weights at {result.memory_share:.0%} of that"
        click.echo(f"  memory               {result.memory_gbps:10.1f} GB/s when read; {share}")
    for warning in result.warnings:
        click.echo(f"  warning              {warning}")
    return 0


async def _bench(
    session: AbstractAsyncContextManager[Client], model: str, rounds: int, together: Sequence[int]
) -> Result:
    async with session as client:
        info = await client.load(model)  # it is loaded: this only says how
        words = random.Random(0)
        await _answers(client, model, [_prompt(words, SHORT)], NEW_TOKENS)  # warms caches; not counted
        reading, alone = [], []
        rates: dict[int, list[float]] = {count: [] for count in together}
        for number in range(1, rounds + 1):
            say(f"round {number} of {rounds}")
            reading += await _answers(client, model, [_prompt(words, LONG)], 1)
            alone += await _answers(client, model, [_prompt(words, SHORT)], NEW_TOKENS)
            for count, found in rates.items():
                prompts = [_prompt(words, SHORT) for _ in range(count)]
                found.append(_rate(await _answers(client, model, prompts, NEW_TOKENS)))
    decode = median(answer.tokens_per_second for answer in alone)
    speed, share = _memory(info, decode)
    return Result(
        model=model,
        backend=info.backend,
        device=info.device,
        dtype=info.dtype,
        quant=info.quant,
        rounds=rounds,
        prompt_tokens=round(median(answer.usage.prompt_tokens for answer in reading)),
        ttft_ms=1e3 * median(answer.ttft for answer in alone),
        prefill=median((a.usage.prompt_tokens - a.usage.cached_tokens) / a.ttft for a in reading),
        decode=decode,
        throughput={count: median(found) for count, found in rates.items()},
        memory_gbps=speed,
        memory_share=share,
        warnings=info.warnings,
    )


def _prompt(words: random.Random, count: int) -> str:
    """Text no round before had, so that the prefix cache has nothing to give."""
    return " ".join(words.choice(WORDS) for _ in range(count))


async def _answers(client: Client, model: str, prompts: list[str], tokens: int) -> list[Done]:
    return list(await asyncio.gather(*(_answer(client, model, prompt, tokens) for prompt in prompts)))


async def _answer(client: Client, model: str, prompt: str, tokens: int) -> Done:
    async with aclosing(client.complete(model, prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True)) as events:
        async for event in events:
            if isinstance(event, Done):
                return event
    raise AppError("the daemon ended an answer without saying so")


def _rate(answers: list[Done]) -> float:
    """Tokens after the first ones over the time they took, of answers that were asked for together."""
    tokens = sum(answer.usage.completion_tokens - 1 for answer in answers)
    return tokens / (max(answer.seconds for answer in answers) - min(answer.ttft for answer in answers))


def _memory(info: LoadedModel, decode: float) -> tuple[float | None, float | None]:
    """Read bandwidth in GB/s and the share of it that decoding uses, where both are known."""
    if not info.token_bytes:
        return None, None
    say("measuring how fast the memory is read")
    speed = load(info.backend).read_bandwidth()
    return (None, None) if speed is None else (speed / 1e9, info.token_bytes * decode / speed)
