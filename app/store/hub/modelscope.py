"""Metadata of repositories at ModelScope, from its REST API."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated
from urllib.parse import quote

import msgspec
from msgspec import Meta

from ...errors import AppError, DownloadFailed, ModelNotFound
from ..names import HubName
from ..remote import RemoteFile, Repository
from ..transfer.failures import Refused
from ..transfer.policy import Policy
from .hubs import RETRY_HINT, modelscope_endpoint
from .metadata import convert, fetch_json

MAIN = "master"  # the default branch
COMMIT = re.compile(r"[0-9a-f]{40}")


class _File(msgspec.Struct, rename="pascal"):
    path: str
    type: str
    size: Annotated[int, Meta(ge=0, lt=2**60)]  # bytes
    sha256: Annotated[str, Meta(pattern=r"^([0-9a-fA-F]{64})?\Z")] | None = None


class _Committer(msgspec.Struct, rename="pascal"):
    id: str | None = None


class _Data(msgspec.Struct, rename="pascal"):
    files: list[_File]
    latest_committer: _Committer | None = None


class _Status(msgspec.Struct, rename="pascal"):
    code: int


class _Reply(msgspec.Struct, rename="pascal"):
    data: _Data


def lookup_modelscope(name: HubName, policy: Policy) -> Repository:
    """The files of a revision. Raises ModelNotFound or DownloadFailed."""
    endpoint = modelscope_endpoint()
    revision = name.revision or MAIN
    url = f"{endpoint}/api/v1/models/{name.repo}/repo/files?Revision={quote(revision, safe='')}&Recursive=True"
    task = f"look up {name} at {endpoint}"
    try:
        reply = fetch_json(task, url, policy)
    except Refused as refusal:
        raise _error(endpoint, name, revision, refusal) from refusal
    if convert(task, reply, _Status).code != 200:
        raise _not_found(endpoint, name, revision)
    return _repository(convert(task, reply, _Reply).data, endpoint, name, revision)


def _repository(data: _Data, endpoint: str, name: HubName, revision: str) -> Repository:
    """A reply without a commit gets a hash of the files in its place."""
    base = f"{endpoint}/models/{name.repo}/resolve/{quote(revision, safe='')}/"
    files = [_remote_file(base, file) for file in data.files if file.type != "tree"]
    commit = (data.latest_committer and data.latest_committer.id) or ""
    if not COMMIT.fullmatch(commit):
        content = "\n".join(sorted(f"{file.name} {file.key}" for file in files))
        commit = hashlib.sha1(content.encode(errors="surrogatepass")).hexdigest()
    return Repository(name.repo, commit, tuple(files), name.folder, "ms", revision)


def _remote_file(base: str, file: _File) -> RemoteFile:
    sha256 = file.sha256.lower() if file.sha256 else None
    return RemoteFile(file.path, file.size, sha256, None, base + quote(file.path, errors="surrogatepass"))


def _error(endpoint: str, name: HubName, revision: str, refusal: Refused) -> AppError:
    if refusal.status in (404, 410):
        return _not_found(endpoint, name, revision)
    return DownloadFailed(f"cannot look up {name}: {refusal}", hint=RETRY_HINT)


def _not_found(endpoint: str, name: HubName, revision: str) -> ModelNotFound:
    return ModelNotFound(
        f"no model {name.repo!r} with revision {revision!r} at {endpoint}",
        hint="check the spelling; for a private model, set MODELSCOPE_API_TOKEN",
        param="model",
    )
