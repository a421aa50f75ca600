"""Output of the commands: errors, tables, and text without control characters."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from ...engine.errors import encodable
from ..errors import AdapterNotFound, AppError, DownloadFailed, InvalidRequest, ModelNotFound, StorageFailed
from ..sizes import size
from ..start import INTERRUPTED
from ..store.names import is_path

if TYPE_CHECKING:
    from ..store.records import DtypeShare

# Characters that control a terminal: C0 without newline and tab, DEL and C1.
CONTROL_CODES = {*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
REPLACEMENTS = dict.fromkeys(CONTROL_CODES, REPLACEMENT)


def run_command(command: click.Command, args: list[str]) -> int:
    """Run a click command and return its exit code. An error prints one line and a hint."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the terminal's encoding lacks is no error
        sys.stdout.reconfigure(errors="replace")
    try:
        _refuse_undecodable(args)
        code = command.main(args, prog_name="localllm", standalone_mode=False)
    except click.Abort as abort:
        if abort.__cause__ is None and sys.stderr.isatty():  # Ctrl-C at a prompt leaves the cursor in its line
            say("")
        return INTERRUPTED
    except (click.ClickException, AppError, OSError) as error:
        return report(_with_path_hint(_app_error(error), args), as_json="--json" in args)
    return code if isinstance(code, int) else 0


def _refuse_undecodable(args: list[str]) -> None:
    """Raises InvalidRequest for an argument with bytes that are no text in the encoding of the locale."""
    for arg in args:
        try:
            arg.encode("utf-8")
        except UnicodeEncodeError:
            hint = "use UTF-8, for example with the variable LC_ALL=C.UTF-8; rename a file with another name"
            raise InvalidRequest(f"the argument {arg[:200]!a} is not text in this encoding", hint=hint) from None


def _with_path_hint(error: AppError, args: list[str]) -> AppError:
    """The error. If a model or an adapter is missing and a path has its name, the hint tells how to name the path."""
    if not isinstance(error, ModelNotFound | AdapterNotFound | DownloadFailed):
        return error
    for arg in args[1:]:
        if arg in error.message and not is_path(arg) and os.path.exists(arg):  # noqa: PTH110 - Path raises for a long text
            kind = "folder" if os.path.isdir(arg) else "file"  # noqa: PTH112
            hint = f"the {kind} {arg} is named ./{arg}" + (f"; {error.hint}" if error.hint else "")
            return type(error)(error.message, hint=hint, param=error.param, **error.numbers)
    return error


def _app_error(error: click.ClickException | AppError | OSError) -> AppError:
    if isinstance(error, AppError):
        return error
    if isinstance(error, OSError):
        return StorageFailed(str(error))
    hint = ""
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "localllm"
        hint = f"see {command} --help"
    return InvalidRequest(error.format_message(), hint=hint)


def report(error: AppError, as_json: bool) -> int:
    """Print an error to standard error. Returns its exit code."""
    if as_json:
        body = {"message": error.message, "type": error.type, "code": error.code, "hint": error.hint, **error.numbers}
        say(json.dumps({"error": body}))
    else:
        _echo(click.style("error:", fg="red") + f" {one_line(error.message)}")
        if error.hint:
            _echo(click.style("hint:", fg="cyan") + f" {one_line(error.hint)}")
    return error.exit_code


def print_json(value: object, indent: int | None = 2) -> None:
    """Print a result, such as a struct of app/store/records.py, to standard output as JSON."""
    click.echo(json_text(value, indent))


def json_text(value: object, indent: int | None = None) -> str:
    """A result as the JSON that the command line and the API have in common."""
    import msgspec

    return json.dumps(_encodable(msgspec.to_builtins(value)), indent=indent)


def _encodable(value: object) -> object:
    """The value with texts that every JSON parser reads."""
    match value:
        case str():
            return encodable(value)
        case dict():
            return {_encodable(key): _encodable(item) for key, item in value.items()}
        case list() | tuple():
            return [_encodable(item) for item in value]
    return value


def one_line(text: str) -> str:
    """The text in one line, without control characters and without characters that reverse the direction of text."""
    words = " ".join(text.split())
    return "".join(character if character.isprintable() else REPLACEMENT for character in words)


def say(line: str) -> None:
    """Print a line to standard error, without control characters. Standard output is for results only.

    A line break, for example in the name of a file, would begin a line that looks like one of localllm.
    """
    _echo(safe(line).replace("\n", " "))


def _echo(line: str) -> None:
    click.echo(line, err=True, color=False if os.environ.get("NO_COLOR") else None)


def weights_text(shares: Iterable[DtypeShare]) -> str:
    """The weights of each type, for example `Q4_K 2.1 GiB in 168 tensors; F32 1.2 MiB in 113 tensors`."""
    texts = []
    for share in shares:
        tensors = "1 tensor" if share.tensors == 1 else f"{share.tensors} tensors"
        texts.append(f"{share.dtype} {size(share.bytes)} in {tensors}")
    return "; ".join(texts)


def write(text: str) -> None:
    """Print text of an answer to standard output, and flush."""
    sys.stdout.write(safe(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def safe(text: str) -> str:
    """The text with control characters replaced, so that a model cannot control the terminal."""
    return text.translate(REPLACEMENTS)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, two spaces apart. The cells may have text of a hub or a repository."""
    lines = [[one_line(cell) for cell in line] for line in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = map(str.ljust, line, widths)
        click.echo("  ".join(cells).rstrip())
