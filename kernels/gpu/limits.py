"""Limits that make dispatch treat an NVIDIA GPU as a smaller one, to test the code of cards that a developer lacks.

The environment variables LOCALLLM_DEV_CUDA_CAPABILITY (8.6), _SHARED (bytes of shared memory per thread block),
_PROCESSORS (number of multiprocessors) and _MEMORY (8GiB) set them. All code that queries a property of an NVIDIA GPU
applies these limits, so this module alone reads the variables. It imports no torch. _MEMORY limits the GPUs and NPUs
of other vendors, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

PREFIX = "LOCALLLM_DEV_CUDA_"
VARIABLES = tuple(PREFIX + name for name in ("CAPABILITY", "SHARED", "PROCESSORS", "MEMORY"))
MIN_SHARED = 48 << 10  # every GPU permits 48 KiB per thread block
UNITS = {"": 1, "MiB": 1 << 20, "GiB": 1 << 30}


class LimitRefused(ValueError):
    """A variable has an invalid value, or a value that the GPU itself does not reach. The message names both."""


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """Upper limits of the properties of a GPU; None: no limit. Each method applies one limit to the real value and
    raises LimitRefused if the GPU does not reach it."""

    capability: tuple[int, int] | None = None
    shared: int | None = None  # bytes of shared memory per thread block
    processors: int | None = None
    memory: int | None = None  # bytes

    def limit_capability(self, capability: tuple[int, int]) -> tuple[int, int]:
        if self.capability is None:
            return capability
        if self.capability > capability:
            raise _too_large("CAPABILITY", _version(self.capability), _version(capability))
        return self.capability

    def limit_shared(self, shared: int) -> int:
        return _limit("SHARED", self.shared, shared)

    def limit_processors(self, processors: int) -> int:
        return _limit("PROCESSORS", self.processors, processors)

    def limit_memory(self, free: int, total: int) -> tuple[int, int]:
        """(free, total) bytes of a GPU with less memory. The number of bytes in use is the same."""
        limit = _limit("MEMORY", self.memory, total)
        return max(0, limit - (total - free)), limit

    def describe(self) -> str:
        """The limits that are set, for people; empty if none is."""
        values = {
            "compute capability": self.capability and _version(self.capability),
            "bytes of shared memory": self.shared,
            "multiprocessors": self.processors,
            "bytes of memory": self.memory,
        }
        return ", ".join(f"{value} {title}" for title, value in values.items() if value)


def read_limits(environment: Mapping[str, str]) -> GpuLimits:
    """The limits in the environment variables. Raises LimitRefused for a value that is not valid."""
    shared = _number("SHARED", environment, 1)
    if shared is not None and shared < MIN_SHARED:
        raise LimitRefused(f"{PREFIX}SHARED={shared}: at least {MIN_SHARED} bytes expected, which every GPU has")
    return GpuLimits(
        capability=_capability(environment),
        shared=shared,
        processors=_number("PROCESSORS", environment, 1),
        memory=_memory(environment),
    )


@cache
def gpu_limits() -> GpuLimits:
    """The limits of this process. Raises LimitRefused."""
    return read_limits(os.environ)


def _limit(name: str, limit: int | None, value: int) -> int:
    if limit is None:
        return value
    if limit > value:
        raise _too_large(name, limit, value)
    return limit


def _too_large(name: str, limit: object, value: object) -> LimitRefused:
    return LimitRefused(
        f"{PREFIX}{name}={limit}: this GPU has only {value}; the variable can imitate smaller GPUs only"
    )


def _capability(environment: Mapping[str, str]) -> tuple[int, int] | None:
    text = environment.get(PREFIX + "CAPABILITY")
    if not text:
        return None
    match = re.fullmatch(r"(\d{1,2})\.(\d)", text)
    if match is None:
        raise LimitRefused(f"{PREFIX}CAPABILITY={text}: a compute capability such as 8.6 expected")
    return int(match[1]), int(match[2])


def _number(name: str, environment: Mapping[str, str], minimum: int) -> int | None:
    text = environment.get(PREFIX + name)
    if not text:
        return None
    if not re.fullmatch(r"\d{1,12}", text) or int(text) < minimum:
        raise LimitRefused(f"{PREFIX}{name}={text}: a whole number of at least {minimum} expected")
    return int(text)


def _memory(environment: Mapping[str, str]) -> int | None:
    text = environment.get(PREFIX + "MEMORY")
    if not text:
        return None
    match = re.fullmatch(r"(\d{1,15})(MiB|GiB|)", text)
    if match is None or int(match[1]) == 0:
        raise LimitRefused(f"{PREFIX}MEMORY={text}: a size such as 8GiB, 7900MiB or a number of bytes expected")
    return int(match[1]) * UNITS[match[2]]


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
