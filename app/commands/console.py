"""Output of the commands: errors, tables, and text without control characters."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import click

from ..errors import AppError, InvalidRequest, StorageFailed

INTERRUPTED = 130  # 128 + SIGINT, as shells report it

# Characters that control a terminal: C0 without newline and tab, DEL, C1.
CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def run_command(command: click.Command, args: list[str]) -> int:
    """Run a click command. An error becomes one line, a hint and an exit code."""
    as_json = "--json" in args
    try:
        code = command.main(args, prog_name="localllm", standalone_mode=False)
    except click.Abort:
        return INTERRUPTED
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "localllm"
        return report(InvalidRequest(error.format_message(), hint=f"see {where} --help"), as_json)
    except click.ClickException as error:
        return report(InvalidRequest(error.format_message()), as_json)
    except AppError as error:
        return report(error, as_json)
    except OSError as error:
        return report(StorageFailed(str(error)), as_json)
    return code if isinstance(code, int) else 0


def report(error: AppError, as_json: bool) -> int:
    """Print an error to standard error. Returns its exit code."""
    if as_json:
        body = {"message": error.message, "type": error.type, "code": error.code, "hint": error.hint, **error.numbers}
        say(json.dumps({"error": body}))
    else:
        say(click.style("error:", fg="red") + f" {' '.join(safe(error.message).split())}")
        if error.hint:
            say(click.style("hint:", fg="cyan") + f" {safe(error.hint)}")
    return error.exit_code


def say(line: str) -> None:
    """Print a line to standard error. Standard output is for results only."""
    click.echo(line, err=True, color=False if os.environ.get("NO_COLOR") else None)


def write(text: str) -> None:
    """Print a part of an answer to standard output and flush."""
    sys.stdout.write(safe(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def safe(text: str) -> str:
    """The text with control characters replaced, so that a model cannot control the terminal."""
    return text.translate(CONTROL)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, two spaces apart."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
