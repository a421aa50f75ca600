"""`localllm doctor`: the report as text or JSON."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

import click

from .. import config
from ..client import Client, LoadedModel
from ..doctor import OpsReport, Report, Verdict, examine, examine_ops
from ..errors import AppError, DaemonUnreachable, NoBackend
from ..sizes import size


def doctor(backend: str | None, ops: bool, as_json: bool) -> int:
    """Print the report; exit code 5 when nothing, or not what was asked for, can run."""
    settings = config.load({"backend": backend})
    if ops:
        found = examine_ops(settings.developer.reference_ops)
        click.echo(json.dumps(asdict(found), indent=2)) if as_json else _print_ops(found)
        return 0
    report = examine(settings.backend)
    daemon = asyncio.run(_daemon(settings))
    if as_json:
        more = {"daemon": daemon, "reference_ops": settings.developer.reference_ops}
        click.echo(json.dumps({**report.for_json(), **more}, indent=2))
    else:
        _print(report, daemon, settings.developer.reference_ops)
    return 0 if report.choice else NoBackend.exit_code


async def _daemon(settings: config.Settings) -> str:
    """Its state in words; it is not started for this."""
    try:
        async with await Client.connect(settings, start=False) as client:
            models = [named(model) for model in await client.loaded()]
    except DaemonUnreachable:
        return "not running"
    except (AppError, OSError) as error:
        return f"cannot be asked: {error}"
    return f"running, with {', '.join(models)} loaded" if models else "running, with no model loaded"


def named(model: LoadedModel) -> str:
    """A loaded model, with what is to be known of it."""
    told = "; ".join(filter(None, (model.quant, *model.warnings)))
    return f"{model.id} ({told})" if told else model.id


def _print(report: Report, daemon: str, reference_ops: tuple[str, ...]) -> None:
    click.echo("Backends, in the order they are tried")
    for verdict in report.backends:
        click.echo(f"  {verdict.backend:<9} {'yes' if verdict.available else 'no '}  {_says(verdict)}")
        for name, value in verdict.features:
            click.echo(f"  {'':<14} {name}: {value}")
    _section("Choice", {report.choice or "none": report.reason, **({"hint": report.hint} if report.hint else {})})
    memory = f"{size(report.memory['available'])} free of {size(report.memory['total'])}"
    if reference_ops:
        _section("Slowed down", {"reference_ops": f"{', '.join(reference_ops)} (see localllm doctor --ops)"})
    if report.self_tests:
        _section("Self-test of kernels", report.self_tests)
    _section("Machine", {**report.machine, "memory": memory})
    _section("Places", report.paths)
    _section("Models", {"here": str(report.models), "disk": f"{size(report.disk_free)} free", "daemon": daemon})
    _section("Versions", report.versions)


def _print_ops(report: OpsReport) -> None:
    platforms = list(next(iter(report.ops.values())))
    width = {name: max(len(name), *(len(row[name]) for row in report.ops.values())) for name in platforms}
    for op, row in {"op": dict(zip(platforms, platforms, strict=True)), **report.ops}.items():
        click.echo(f"{op:<30}{'  '.join(f'{row[name]:<{width[name]}}' for name in platforms)}".rstrip())
    click.echo(f"\nwithout ops of their own so far: {', '.join(report.without)}")
    if report.reference_ops:
        click.echo(f"at their references, as LOCALLLM_DEV_REFERENCE_OPS says: {', '.join(report.reference_ops)}")


def _says(verdict: Verdict) -> str:
    return f"{verdict.says}, {size(verdict.free)} free of {size(verdict.memory)}" if verdict.available else verdict.says


def _section(title: str, entries: dict[str, str]) -> None:
    click.echo(f"\n{title}")
    for name, value in entries.items():
        click.echo(f"  {name:<15} {value}")
