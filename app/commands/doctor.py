"""`localllm doctor`: the report as text or JSON."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, astuple

import click

from .. import config
from ..client import Client, LoadedModel
from ..doctor import BackendStatus, OpsReport, Report, examine, examine_ops
from ..errors import AppError, DaemonUnreachable, NoBackend
from ..sizes import size
from .console import print_json, say
from .console import table as print_table


def doctor(backend: str | None, ops: bool, model: str | None, as_json: bool) -> int:
    """Print the report. The exit code is 5 if the selected backend, or every backend, is unavailable. `model`: trace
    its ops instead."""
    settings = config.load({"backend": backend})
    if model is not None:
        return _doctor_trace(model, settings, as_json)
    if ops:
        return _doctor_ops(settings, as_json)
    report = examine(settings.backend)
    daemon = asyncio.run(_daemon(settings))
    if as_json:
        more = {"daemon": daemon, "ops": settings.developer.ops}
        print_json({**report.for_json(), **more})
    else:
        _print(report, daemon, settings.developer.ops)
    return 0 if report.choice else NoBackend.exit_code


def _doctor_ops(settings: config.Settings, as_json: bool) -> int:
    report = examine_ops(settings.developer.ops)
    if as_json:
        print_json(asdict(report))
    else:
        _print_ops(report)
    return 0


def _doctor_trace(model: str, settings: config.Settings, as_json: bool) -> int:
    from ..op_trace import trace  # imports the engine

    report = trace(model, settings)
    if as_json:
        print_json(asdict(report))
        return 0
    rows = [list(map(str, astuple(call))) for call in report.calls]
    print_table(("op", "implementation", "inputs", "output", "calls"), rows)
    for warning in report.warnings:
        say(f"warning: {warning}")
    return 0


async def _daemon(settings: config.Settings) -> str:
    """The state of the daemon in words. Does not start it."""
    try:
        async with await Client.connect(settings, start=False) as client:
            models = [label(model) for model in await client.loaded()]
    except DaemonUnreachable:
        return "not running"
    except (AppError, OSError) as error:
        return f"not responding: {error}"
    if not models:
        return "running, no model loaded"
    return f"running, loaded: {', '.join(models)}"


def label(model: LoadedModel) -> str:
    """The id of a loaded model, with its quantisation and warnings."""
    details = "; ".join(filter(None, (model.quant, *model.warnings)))
    return f"{model.id} ({details})" if details else model.id


def _print(report: Report, daemon: str, choices: tuple[str, ...]) -> None:
    click.echo("Backends, in order of preference")
    for status in report.backends:
        click.echo(f"  {status.backend:<9} {'yes' if status.available else 'no '}  {_description(status)}")
        for name, value in status.features:
            click.echo(f"  {'':<14} {name}: {value}")
    selected = {report.choice or "none": report.reason}
    if report.hint:
        selected["hint"] = report.hint
    _section("Selected", selected)
    memory = f"{size(report.memory['available'])} free of {size(report.memory['total'])}"
    if choices:
        _section("LOCALLLM_DEV_OPS", {"choices": f"{', '.join(choices)} (see localllm doctor --ops)"})
    if report.self_tests:
        _section("Kernel self-test", report.self_tests)
    _section("Machine", {**report.machine, "memory": memory})
    _section("Paths", report.paths)
    _section("Models", {"count": str(report.models), "disk": f"{size(report.disk_free)} free", "daemon": daemon})
    _section("Versions", report.versions)


def _print_ops(report: OpsReport) -> None:
    platforms = list(next(iter(report.ops.values())))
    print_table(("op", *platforms), [[op, *row.values()] for op, row in report.ops.items()])
    click.echo()
    kernels = [list(map(str, astuple(one))) for one in report.kernels]
    print_table(("platform", "implementation", "minimum capability", "ops"), kernels)
    for plugin, defects in report.plugins.items():
        _section(f"Plug-in {plugin}", {"not used": "; ".join(defects)} if defects else {})
    if report.without:
        click.echo(f"\nbackends without their own ops: {', '.join(report.without)}")
    if report.choices:
        _section("LOCALLLM_DEV_OPS", {"choices": ", ".join(report.choices), **report.refused})


def _description(status: BackendStatus) -> str:
    if not status.available:
        return status.says
    return f"{status.says}, {size(status.free)} free of {size(status.memory)}"


def _section(title: str, entries: dict[str, str]) -> None:
    click.echo(f"\n{title}")
    for name, value in entries.items():
        click.echo(f"  {name:<15} {value}")
