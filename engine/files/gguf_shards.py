"""The names of the shards of a GGUF model, as llama.cpp writes them: NAME-00001-of-00003.gguf."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

SUFFIX = ".gguf"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Shard:
    """The name of a shard, and its parts."""

    name: str
    stem: str  # without the numbers and the extension
    index: int  # number of the shard, from 1
    count: int  # number of shards of the model

    @property
    def siblings(self) -> tuple[str, ...]:
        """The names of all shards of the model, in their order."""
        return tuple(f"{self.stem}-{index:05}-of-{self.count:05}{SUFFIX}" for index in range(1, self.count + 1))


def parse_shard(name: str) -> Shard | None:
    """The shard with this file name or path; None for the name of another file."""
    match = _SHARD.fullmatch(name)
    return Shard(name, match["stem"], int(match["index"]), int(match["count"])) if match else None


def stem_of(name: str) -> str:
    """The name of a GGUF file without its extension and without the number of its shard."""
    shard = parse_shard(name)
    if shard is not None:
        return shard.stem
    return name[: -len(SUFFIX)] if name.lower().endswith(SUFFIX) else name


def missing_shards(names: Sequence[str]) -> list[str]:
    """The names of the missing shards of the model to which all `names` belong; empty for a model of one file."""
    shard = parse_shard(names[0]) if names else None
    if shard is None:
        return []
    present = set(names)
    return [name for name in shard.siblings if name not in present]
