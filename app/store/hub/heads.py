"""Size and hash of a remote file from the headers of a reply, for hubs with incomplete metadata."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType

import httpx

from ...errors import DownloadFailed
from ..remote import RemoteFile
from ..transfer.failures import Refused
from ..transfer.http import Connection, Credentials, origin
from ..transfer.policy import Policy
from .hubs import credentials
from .metadata import attempt

THREADS = 8
MAX_REQUESTS = 1000  # number of requests for the file sizes of one repository
SHA256 = re.compile(r"[0-9a-f]{64}")
GIT_OID = re.compile(r"[0-9a-f]{40}")
EMPTY = hashlib.sha256().hexdigest()
FIRST_BYTE: Mapping[str, str] = MappingProxyType({"Range": "bytes=0-0"})
UNKNOWN = -1  # a size


@dataclass(frozen=True, slots=True)
class Head:
    """The facts about a file in the replies to one request."""

    size: int  # bytes
    etag: str = ""  # of the last reply
    hash: str = ""  # as the server of the address names it: SHA-256 or git hash; empty: it names none


def request_head(url: str, policy: Policy, tokens: Credentials, headers: Mapping[str, str] = FIRST_BYTE) -> Head:
    """The head of a file. Only its first byte is requested. Raises Transient or Refused."""
    connection = Connection(policy, tokens)
    replies: list[httpx.Response] = []
    try:
        connection.open(url, headers, replies.append).close()
    finally:
        connection.close()
    return Head(_size(replies[-1]), replies[-1].headers.get("etag", ""), _hash(url, replies))


def with_hashes(files: Iterable[RemoteFile], policy: Policy) -> list[RemoteFile]:
    """The files with the hashes of their ETags, where the metadata of the hub has none.

    A file stays without a hash if its server names none. Raises DownloadFailed for an error of the network.
    """
    tokens = credentials()

    def complete(file: RemoteFile) -> RemoteFile:
        if file.has_hash:
            return file
        if not file.size:
            return replace(file, sha256=EMPTY)
        try:
            head = attempt(f"look up {file.name}", policy, lambda: request_head(file.url, policy, tokens))
        except Refused:  # the download has the error
            return file
        return _with_hash(file, head)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(complete, files))


def with_sizes(files: Sequence[RemoteFile], policy: Policy) -> list[RemoteFile]:
    """The files with sizes: of a file of UNKNOWN size, its head is requested. Raises DownloadFailed or Refused."""
    unknown = sum(file.size == UNKNOWN for file in files)
    if unknown > MAX_REQUESTS:
        raise DownloadFailed(f"the hub names no sizes of {unknown} files", hint="set HF_ENDPOINT to another mirror")
    tokens = credentials()

    def complete(file: RemoteFile) -> RemoteFile:
        if file.size != UNKNOWN:
            return file
        # A server answers a request of the first byte of an empty file with an error.
        head = attempt(f"look up {file.name}", policy, lambda: request_head(file.url, policy, tokens, {}))
        return _with_hash(replace(file, size=head.size), head)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(complete, files))


def _with_hash(file: RemoteFile, head: Head) -> RemoteFile:
    if file.has_hash:
        return file
    if SHA256.fullmatch(head.hash):
        return replace(file, sha256=head.hash)
    if GIT_OID.fullmatch(head.hash):
        return replace(file, git_oid=head.hash)
    return file


def _hash(url: str, replies: Iterable[httpx.Response]) -> str:
    """The hash in X-Linked-ETag or ETag of the hub, as huggingface_hub takes it. The content server's ETag is none."""
    for reply in replies:
        if origin(reply.request.url) == origin(url):
            for name in ("x-linked-etag", "etag"):
                etag = _normalized(reply.headers, name)
                if SHA256.fullmatch(etag) or GIT_OID.fullmatch(etag):
                    return etag
    return ""


def _normalized(headers: Mapping[str, str], name: str) -> str:
    return headers.get(name, "").removeprefix("W/").strip('"').lower()


def _size(reply: httpx.Response) -> int:
    total = reply.headers.get("content-range", "").rpartition("/")[2]
    if reply.status_code == 200:
        total = reply.headers.get("content-length", "")
    if not (total.isascii() and total.isdigit() and len(total) < 19):
        raise Refused("the server does not tell the size of the file")
    return int(total)
