"""`localllm selftest`: checks a backend with the known answers of the built-in model, and the products of a GPU with
the widths of real models. Owners of other GPUs paste its report into an issue."""

from __future__ import annotations

import asyncio
import json
import platform
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import click

from ...backends import load
from ...engine.runner import DeviceInfo
from .. import config
from ..client import Client, Done, LoadedModel, LoadFlags, TextPiece
from ..doctor import versions
from ..errors import AppError
from ..store.names import GUIDE
from ..version import VERSION
from .console import print_json, say
from .session import loaded_client

if TYPE_CHECKING:
    from ...backends.pytorch.product_check import ProductResult

Messages = Sequence[dict[str, Any]]

EARLIER = 4  # questions before that of the prefix cache: more tokens than a page of any backend
HOT: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "max_tokens": 24, "ignore_eos": True}
HOTTER = HOT | {"temperature": 2.0, "top_p": 1.0}  # with HOT, two seeds may give the same answer


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    ok: bool
    details: str = ""  # number of checked answers, or the difference to the expected answer

    @property
    def line(self) -> str:
        """The result as one line of the report."""
        state = "ok    " if self.ok else "FAILED"
        details = f": {self.details}" if self.details else ""
        return f"  {state}  {self.name}{details}"


@dataclass(slots=True)
class Report:
    """The results of `localllm selftest`, with the facts about the machine that a bug report needs."""

    localllm: str
    machine: str
    backend: str
    device: str
    features: dict[str, str]
    dtype: str
    quant: str
    warnings: tuple[str, ...] = ()  # of the loaded model, for example that a kernel failed its self-test
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


def selftest(load_flags: Mapping[str, Any], as_json: bool) -> int:
    """Print the report. The exit code is 1 if a check failed."""
    report = asyncio.run(_selftest(LoadFlags(**load_flags)))
    if as_json:
        print_json({**asdict(report), "ok": report.ok})
    else:
        _print(report)
    return 0 if report.ok else 1


def _print(report: Report) -> None:
    click.echo(f"{report.backend} on {report.device} ({report.dtype}), localllm {report.localllm}, {report.machine}")
    for name, value in report.features.items():
        click.echo(f"  {name}: {value}")
    for warning in report.warnings:
        click.echo(f"  warning: {warning}")
    for check in report.checks:
        click.echo(check.line)
    click.echo("all checks passed" if report.ok else "some checks failed: please report this output")


async def _selftest(flags: LoadFlags) -> Report:
    async with loaded_client(config.load(), GUIDE, flags) as client:
        info = await client.load(GUIDE)  # returns the properties of the loaded model
        report = _report(info)
        async for check in _checks(_Chat(client)):
            report.checks.append(check)
            say(f"{len(report.checks)} checks finished")
    from ...backends.platforms import device_checks  # imports torch

    bandwidth = load(info.backend).read_bandwidth()
    report.features["read bandwidth"] = f"{bandwidth / 1e9:.0f} GB/s" if bandwidth else "not measured"
    for result in device_checks(info.backend, info.dtype):
        report.checks.append(_product_check(result, bandwidth))
        say(f"{len(report.checks)} checks finished")
    return report


def _product_check(result: ProductResult, bandwidth: float | None) -> Check:
    """The check of a product, with its durations as the details. `bandwidth`: bytes per second of the device memory."""
    durations = []
    for rows, seconds in result.seconds.items():
        share = f" ({result.weight_bytes / seconds / bandwidth:.0%} of the bandwidth)" if bandwidth else ""
        durations.append(f"{rows} {'row' if rows == 1 else 'rows'} {1000 * seconds:.3f} ms{share}")
    return Check(result.title, not result.defect, ", ".join(filter(None, (result.defect, *durations))))


def _report(info: LoadedModel) -> Report:
    device = load(info.backend).probe()
    features = dict(device.features) if isinstance(device, DeviceInfo) else {}
    machine = f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}"
    for package, version in versions().items():
        features[f"{package} version"] = version
    return Report(VERSION, machine, info.backend, info.device, features, info.dtype, info.quant, info.warnings)


@dataclass(frozen=True, slots=True)
class _Chat:
    client: Client

    async def ask(self, prompt: str, earlier: Messages = (), **parameters: Any) -> tuple[str, Done]:
        """The answer to a prompt after the messages `earlier`."""
        text = ""
        messages = [*earlier, {"role": "user", "content": prompt}]
        async with aclosing(self.client.chat(GUIDE, messages, **parameters)) as events:
            async for event in events:
                if isinstance(event, TextPiece):
                    text += event.text
                elif isinstance(event, Done):
                    return text, event
        raise AppError("the daemon ended the answer without a final event")

    async def texts(self, prompts: list[str], together: bool, **parameters: Any) -> list[str]:
        results: Sequence[tuple[str, Done]]
        if together:
            results = await asyncio.gather(*(self.ask(prompt, **parameters) for prompt in prompts))
        else:
            results = [await self.ask(prompt, **parameters) for prompt in prompts]
        return [text for text, _ in results]


async def _checks(chat: _Chat) -> AsyncIterator[Check]:
    file = files("localllm.assets") / "guide" / "answers.json"
    entries: list[dict[str, str]] = json.loads(file.read_text("utf-8"))
    prompts = [entry["prompt"] for entry in entries]
    answers = [entry["answer"] for entry in entries]
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 80}
    texts = await chat.texts(prompts, together=False, **greedy)
    yield _same("known answers, one by one", texts, answers)
    texts = await chat.texts(prompts, together=True, **greedy)
    yield _same("known answers, in parallel", texts, answers)
    yield await _prefix(chat, prompts[0], answers[0], conversation(entries[1 : 1 + EARLIER]), greedy)
    first = await chat.texts(prompts[:8], together=False, seed=7, **HOT)
    second = await chat.texts(prompts[:8], together=False, seed=7, **HOT)
    yield _same("equal seeds give equal answers", second, first)
    seven = await chat.texts(prompts[:8], together=True, seed=7, **HOTTER)
    eight = await chat.texts(prompts[:8], together=True, seed=8, **HOTTER)
    yield Check("different seeds give different answers", seven != eight)
    yield await _schema(chat)


def _same(name: str, answers: list[str], expected: list[str]) -> Check:
    wrong = []
    for answer, correct in zip(answers, expected, strict=True):
        if answer.strip() != correct.strip():
            wrong.append(f"{answer[:80]!r}, expected {correct[:80]!r}")
    if not wrong:
        return Check(name, True, f"{len(answers)} answers")
    first = f"the first is {wrong[0]}"
    return Check(name, False, f"{len(wrong)} of {len(answers)} differ; {first}")


def conversation(entries: Sequence[Mapping[str, str]]) -> Messages:
    """Known questions with their answers, as messages."""
    roles = (("user", "prompt"), ("assistant", "answer"))
    return [{"role": role, "content": entry[key]} for entry in entries for role, key in roles]


async def _prefix(chat: _Chat, prompt: str, answer: str, earlier: Messages, greedy: dict[str, Any]) -> Check:
    await chat.ask(prompt, earlier, **greedy)
    text, done = await chat.ask(prompt, earlier, **greedy)
    cached = done.usage.cached_tokens
    check = _same("a known answer from the prefix cache", [text], [answer])
    details = f"{cached} of {done.usage.prompt_tokens} tokens reused"
    if not check.ok:
        details += f"; {check.details}"
    return Check(check.name, check.ok and cached > 0, details)


async def _schema(chat: _Chat) -> Check:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [6, 7, 8]}},  # a tiny model may never end a number
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    text, _ = await chat.ask("How many days has a week?", temperature=0.0, max_tokens=80, response_format=form)
    try:
        fits = json.loads(text).get("n") in (6, 7, 8)
    except (ValueError, AttributeError):
        fits = False
    return Check("an answer that fits its JSON schema", fits, "" if fits else repr(text[:80]))
