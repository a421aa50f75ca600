"""The child process that renders chat templates. It has no secrets, and the parent may kill it at any time.

It imports only jinja2, msgspec and the standard library, so that it starts fast and needs little memory.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from ...bounded import Exhausted, serve


class Job(msgspec.Struct, frozen=True):
    """A rendering. The parent sends it as JSON."""

    template: str
    variables: dict[str, Any]
    max_chars: int


class Rendered(msgspec.Struct, frozen=True):
    text: str = ""
    problem: str = ""  # empty: `text` is complete
    exceeded: bool = False  # the problem is a limit


class _Raised(jinja2.TemplateError):
    """The template called raise_exception."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Templates may append to lists and take from lists, as in llama.cpp: each job has its own data."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training. Here it only renders its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: object) -> NoReturn:
    raise _Raised(str(message))


# Without the marks of protected text (chat/tokenizer/special_tokens.py), which no template may escape.
_NOT_ASCII = re.compile("[\x7f-\U000ffeff\U000fff02-\U0010ffff]")


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` of transformers: unlike the filter of jinja, it writes no HTML escapes."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def environment() -> ImmutableSandboxedEnvironment:
    """The jinja environment of chat templates in transformers, without helpers that no template needs."""
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
    for name in ("lipsum", "cycler", "joiner"):
        del sandbox.globals[name]
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = _strftime_now
    return sandbox


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    return environment().from_string(template)


def render(job: Job) -> Rendered:
    """Render a template. Raises MemoryError or RecursionError; any other failure is the `problem` of the result."""
    chunks = []
    size = 0
    try:
        for chunk in _compiled(job.template).generate(job.variables):
            size += len(chunk)
            if size > job.max_chars:
                return Rendered(problem=f"it wrote more than {job.max_chars} characters", exceeded=True)
            chunks.append(chunk)
        text = "".join(chunks)
        text.encode()  # raises for lone surrogates, which cannot be tokenized
        return Rendered(text=text)
    except (MemoryError, RecursionError):
        raise
    except _Raised as error:
        return Rendered(problem=_short(str(error)))
    except SecurityError as error:
        return Rendered(problem=f"forbidden operation: {_short(str(error))}")
    except jinja2.TemplateSyntaxError as error:
        return Rendered(problem=f"line {error.lineno}: {_short(str(error.message))}")
    except Exception as error:  # any exception here comes from the template
        return Rendered(problem=f"{type(error).__name__}: {_short(str(error))}")


def _short(text: str) -> str:
    text = text.encode(errors="replace").decode()
    return text if len(text) <= 500 else text[:500] + "…"


def _handle(request: bytes) -> bytes:
    try:
        return msgspec.msgpack.encode(render(msgspec.json.decode(request, type=Job)))
    except MemoryError:
        problem = "it exceeded its memory limit"
    except RecursionError:
        problem = "it is nested too deeply"
    raise Exhausted(msgspec.msgpack.encode(Rendered(problem=problem, exceeded=True)))


if __name__ == "__main__":
    serve(lambda _: None, _handle)
