"""`localllm doctor`: the report as text or JSON."""

from __future__ import annotations

import asyncio
import json

import click

from .. import config
from ..client import Client
from ..doctor import Report, Verdict, examine
from ..errors import AppError, DaemonUnreachable, NoBackend
from .console import size


def doctor(backend: str | None, as_json: bool) -> int:
    """Print the report; exit code 5 when nothing, or not what was asked for, can run."""
    settings = config.load({"backend": backend})
    report = examine(settings.backend)
    daemon = asyncio.run(_daemon(settings))
    if as_json:
        click.echo(json.dumps({**report.for_json(), "daemon": daemon}, indent=2))
    else:
        _print(report, daemon)
    return 0 if report.choice else NoBackend.exit_code


async def _daemon(settings: config.Settings) -> str:
    """Its state in words; it is not started for this."""
    try:
        async with await Client.connect(settings, start=False) as client:
            models = [model.id for model in await client.loaded()]
    except DaemonUnreachable:
        return "not running"
    except (AppError, OSError) as error:
        return f"cannot be asked: {error}"
    return f"running, with {', '.join(models)} loaded" if models else "running, with no model loaded"


def _print(report: Report, daemon: str) -> None:
    click.echo("Backends, in the order they are tried")
    for verdict in report.backends:
        click.echo(f"  {verdict.backend:<9} {'yes' if verdict.available else 'no '}  {_says(verdict)}")
        for name, value in verdict.features:
            click.echo(f"  {'':<14} {name}: {value}")
    _section("Choice", {report.choice or "none": report.reason, **({"hint": report.hint} if report.hint else {})})
    memory = f"{size(report.memory['available'])} free of {size(report.memory['total'])}"
    _section("Machine", {**report.machine, "memory": memory})
    _section("Places", report.paths)
    _section("Models", {"here": str(report.models), "disk": f"{size(report.disk_free)} free", "daemon": daemon})
    _section("Versions", report.versions)


def _says(verdict: Verdict) -> str:
    return f"{verdict.says}, {size(verdict.free)} free of {size(verdict.memory)}" if verdict.available else verdict.says


def _section(title: str, entries: dict[str, str]) -> None:
    click.echo(f"\n{title}")
    for name, value in entries.items():
        click.echo(f"  {name:<15} {value}")
