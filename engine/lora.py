"""Adapters as the engine sees them: a name, a version, a slot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Adapter:
    """A value: the same name with other content is another adapter, so it can reuse neither slot nor KV."""

    name: str
    path: str
    version: str  # content hash
