"""The limits of a transfer: connections, sizes, times and retries."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

MIB = 2**20
HEADROOM = 64 * MIB  # bytes to leave free on the disk


@dataclass(frozen=True, slots=True)
class Policy:
    """Every number that a transfer depends on. Times are in seconds."""

    connections: int = 16  # limit; a transfer starts with fewer
    first_connections: int = 4
    hashers: int = 4  # limit of the files that are hashed at the same time
    unhashed_bytes: int = 256 * MIB  # a limit: requests wait for hashers that are further behind
    chunk_bytes: int = 4 * MIB  # largest unit of the journal; smaller files have one request and no journal
    request_bytes: int = 64 * MIB  # limit of one ranged request, so that connections share a file
    connect_timeout: float = 10.0
    lookup_timeout: float = 60.0  # seconds for one metadata request
    lookup_attempts: int = 3
    stall_timeout: float = 20.0  # a connection without bytes for this time is opened again
    minimum_speed: int = 512  # bytes/s; a connection below it for stall_timeout is opened again
    attempts: int = 8  # failures in a row, without progress, before the next mirror
    first_wait: float = 0.5  # before the second attempt; doubles each time
    longest_wait: float = 20.0
    longest_retry_after: float = 300.0  # a server that asks for more is an error
    content_attempts: int = 3  # maximum downloads of one file with a wrong hash
    bandwidth: int = 0  # bytes/s of all connections; 0: no limit
    sync_interval: float = 2.0  # between two writes of received data to the disk
    tick: float = 0.1  # between two progress events
    headroom: int = HEADROOM


def from_environment(bandwidth: int = 0) -> Policy:
    """The policy of a command. HF_HUB_DOWNLOAD_TIMEOUT sets the stall timeout, as in huggingface_hub."""
    stall = os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT", "")
    policy = Policy(bandwidth=bandwidth)
    if stall.isdigit() and int(stall) > 0:
        policy = replace(policy, stall_timeout=float(stall))
    return policy
