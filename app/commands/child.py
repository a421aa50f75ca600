"""Work of the store for the daemon, in a process of its own: the daemon imports no backend, a hostile file may crash
this process, and a client that disconnects ends it.

Standard input has the body of the request, the argument names the work, and standard output gets a Reply.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from .. import config
from ..api.admin import AliasBody, ConfigureBody, FitBody, ModelBody, PruneBody, SearchBody
from ..api.commands import Reply
from ..errors import AppError, ConfigError, InvalidRequest, StorageFailed
from ..frames import Fault
from ..store.records import FitReport, Inspection, ModelFacts, ModelSettings, Pruning, SearchResult
from .console import json_text


def show(body: ModelBody) -> ModelFacts:
    from ..store.inspection.show import show

    return show(body.model)


def inspect(body: ModelBody) -> Inspection:
    from ..store.inspection.models import inspect

    return inspect(body.model)


def fit(body: FitBody) -> FitReport:
    from .fit import measure

    return measure(body.model, body.context, body.parallel, body.quant, body.backend)


def search(body: SearchBody) -> SearchResult:
    from ..store.hub.searching import search

    return search(body.query, body.limit, body.offline)[0]


def prune(body: PruneBody) -> Pruning:
    from ..store.changes.prune import prune

    return prune(everything=body.everything, confirm=lambda count, total: not body.dry_run)


def alias(body: AliasBody) -> dict[str, str]:
    from ..store import preferences
    from ..store.changes import user_choices

    if body.name is None:
        user_choices.remove_alias(body.alias)
    else:
        user_choices.set_alias(body.alias, body.name)
    return dict(preferences.read().aliases)


def configure(body: ConfigureBody) -> ModelSettings:
    from ..store.changes.user_choices import configure
    from .settings import parse_changes

    try:
        return configure(body.model, parse_changes(body.changes))
    except ConfigError as error:
        raise InvalidRequest(error.message, hint=error.hint, param="changes") from None


WORK: Mapping[str, tuple[type, Callable[[Any], object]]] = MappingProxyType(
    {
        "show": (ModelBody, show),
        "inspect": (ModelBody, inspect),
        "fit": (FitBody, fit),
        "search": (SearchBody, search),
        "prune": (PruneBody, prune),
        "alias": (AliasBody, alias),
        "settings": (ConfigureBody, configure),
    }
)


def reply(name: str, request: bytes) -> Reply:
    """The reply to a request with the body of WORK[name]."""
    kind, work = WORK[name]
    try:
        config.load()
        return Reply(result=json_text(work(msgspec.msgpack.decode(request, type=kind))).encode())
    except AppError as error:
        return Reply(fault=Fault.of(error))
    except OSError as error:
        return Reply(fault=Fault.of(StorageFailed(str(error))))


if __name__ == "__main__":
    output = sys.stdout.buffer
    sys.stdout = sys.stderr  # a library may print
    output.write(msgspec.msgpack.encode(reply(sys.argv[1], sys.stdin.buffer.read())))
