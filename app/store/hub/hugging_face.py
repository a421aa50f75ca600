"""Metadata of repositories at Hugging Face and its mirrors."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import msgspec
from msgspec import Meta

from ...errors import AppError, DownloadFailed, ModelNotFound
from ..names import HubName
from ..remote import MAIN, RemoteFile, Repository
from ..suggestions import hint_for_hub
from ..transfer.failures import Refused
from ..transfer.policy import Policy
from .heads import UNKNOWN, with_sizes
from .hubs import GATED_HINT, RETRY_HINT, endpoints
from .metadata import convert, fetch_json

Size = Annotated[int, Meta(ge=0, lt=2**60)]  # bytes
Sha256 = Annotated[str, Meta(pattern=r"^([0-9a-fA-F]{64})?\Z")]  # empty: none
GitOid = Annotated[str, Meta(pattern=r"^([0-9a-fA-F]{40})?\Z")]  # empty: none


class _Lfs(msgspec.Struct):
    sha256: Sha256 | None = None


class _File(msgspec.Struct):
    rfilename: str
    size: Size | None = None  # None: of a mirror with less metadata
    blobId: GitOid | None = None
    lfs: _Lfs | None = None


class _Model(msgspec.Struct):
    """The fields of a reply that a download needs."""

    sha: Annotated[str, Meta(pattern=r"^[0-9a-f]{40}\Z")]
    siblings: list[_File] | None = None
    cardData: Any = None


def lookup_hugging_face(name: HubName, policy: Policy) -> Repository:
    """Metadata from the first endpoint that replies. A reply that the model does not exist is final.

    Raises ModelNotFound or DownloadFailed.
    """
    failure: DownloadFailed | None = None
    for endpoint in endpoints():
        try:
            return _from_endpoint(endpoint, name, policy)
        except DownloadFailed as error:
            failure = failure or error
    assert failure is not None, "there is at least one endpoint"
    raise failure


def _from_endpoint(endpoint: str, name: HubName, policy: Policy) -> Repository:
    revision = name.revision or MAIN
    url = f"{endpoint}/api/models/{name.repo}/revision/{quote(revision, safe='')}?blobs=true"
    task = f"look up {name.repo} at {endpoint}"
    try:
        model = convert(task, fetch_json(task, url, policy), _Model)
        files = with_sizes([_remote_file(name.repo, model.sha, file) for file in model.siblings or []], policy)
    except Refused as refusal:
        raise _error(endpoint, name, refusal) from refusal
    return Repository(name.repo, model.sha, tuple(files), name.folder, "hf", revision, _licence(model.cardData))


def _remote_file(repo: str, commit: str, file: _File) -> RemoteFile:
    sha256 = file.lfs.sha256.lower() if file.lfs is not None and file.lfs.sha256 else None
    git_oid = file.blobId.lower() if file.lfs is None and file.blobId else None
    path = f"/{repo}/resolve/{commit}/{quote(file.rfilename, errors='surrogatepass')}"
    first, *mirrors = [endpoint + path for endpoint in endpoints()]
    size = UNKNOWN if file.size is None else file.size
    return RemoteFile(file.rfilename, size, sha256, git_oid, first, tuple(mirrors))


def _licence(card: Any) -> str:
    """The licence in the metadata of a repository; empty if it has none. `other` has a name of its own."""
    if not isinstance(card, dict):
        return ""
    licence = card.get("license")
    if licence == "other":
        licence = card.get("license_name") or licence
    return licence if isinstance(licence, str) else ""


def _error(endpoint: str, name: HubName, refusal: Refused) -> AppError:
    """The error for a refused request."""
    if refusal.code == "GatedRepo":
        return DownloadFailed(f"{name.repo} is gated: you do not have access", hint=GATED_HINT)
    if refusal.code == "RevisionNotFound":
        message = f"{name.repo} has no branch, tag or commit {name.revision or MAIN!r}"
        return ModelNotFound(message, hint="omit @revision to use the main branch", param="model")
    if refusal.code == "RepoNotFound":
        hint = hint_for_hub(name.repo) or "check the spelling; for a private model, set HF_TOKEN"
        return ModelNotFound(f"no model {name.repo!r} at {endpoint}", hint=hint, param="model")
    if refusal.status in (401, 403):
        message = f"{endpoint} denies access to {name.repo} ({refusal.status})"
        return DownloadFailed(message, hint="check the spelling and HF_TOKEN: the token may have expired")
    return DownloadFailed(f"cannot look up {name.repo} at {endpoint}: {refusal}", hint=RETRY_HINT)
