"""The daemon as an ASGI app: the routes of the API behind the guards."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import ASGIApp

from ..api.routes import Address, no_route, routes
from .guards import Errors, Heads, Hosts, Keys, Origins, Paths, Traced
from .models import LoadedModels


def build(models: LoadedModels, address: Address) -> ASGIApp:
    """The ASGI app of the daemon."""
    settings = models.settings
    return Starlette(
        routes=routes(models, address),
        middleware=[
            Middleware(Traced),
            Middleware(Paths),
            Middleware(Errors),
            Middleware(Heads),
            Middleware(Hosts, allowed=(*settings.allowed_hosts, *address.names)),
            Middleware(Origins, allowed=settings.allowed_origins),
            Middleware(Keys, key=address.key),
        ],
        exception_handlers={HTTPException: no_route},
    )
