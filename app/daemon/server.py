"""The daemon as an ASGI app: the routes of the API behind the guards."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import ASGIApp

from ..api.routes import Door, no_route, routes
from .guards import Errors, Heads, Hosts, Keys, Origins, Paths, Traced
from .host import Host


def build(host: Host, door: Door) -> ASGIApp:
    """The ASGI app of a daemon with these models, at this address."""
    settings = host.settings
    return Starlette(
        routes=routes(host, door),
        middleware=[
            Middleware(Traced),
            Middleware(Errors),
            Middleware(Heads),
            Middleware(Paths),
            Middleware(Hosts, allowed=(*settings.allowed_hosts, *door.names)),
            Middleware(Origins, allowed=settings.allowed_origins),
            Middleware(Keys, key=door.key),
        ],
        exception_handlers={HTTPException: no_route},
    )
