"""Metadata from the hubs: which files a revision has. No file content is downloaded here."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from ...engine import jsontext
from ..errors import AppError, DownloadFailed, ModelNotFound, StorageFailed
from .names import FileAddress, HubName
from .remote import MAIN, RemoteFile, Repository, check_names
from .suggestions import hint_for_hub
from .transfer.failures import Changed, Refused, Transient, wait_before
from .transfer.http import Connection, Credentials, get_json, origin
from .transfer.policy import Policy, from_environment

Result = TypeVar("Result")

HUGGING_FACE = "https://huggingface.co"
MODELSCOPE = "https://modelscope.cn"
MODELSCOPE_MAIN = "master"  # the default branch of ModelScope
MAX_REPLY = 64 * 2**20  # bytes
SHA256 = re.compile(r"[0-9a-f]{64}")
GIT_OID = re.compile(r"[0-9a-f]{40}")
TRUE = frozenset({"1", "ON", "YES", "TRUE"})  # values of HF_HUB_OFFLINE
RETRY_HINT = "check the network and the proxy settings; then run the command again to continue"
GATED_HINT = "request access on its page, then set HF_TOKEN to a token of your account"


def lookup(name: HubName | FileAddress, policy: Policy | None = None) -> Repository:
    """Fetch the metadata of one revision of a repository, or of one file.

    Raises ModelNotFound, DownloadFailed (network, access, malformed reply) or InvalidRequest (a file name that the
    cache cannot store).
    """
    if is_offline():
        raise offline_error(str(name))
    policy = policy or from_environment()
    if isinstance(name, FileAddress):
        repository = _lookup_file(name, policy)
    elif name.hub == "ms":
        repository = _lookup_modelscope(name, policy)
    else:
        repository = _lookup_hugging_face(name, policy)
    check_names(repository.name, [file.name for file in repository.files])
    return repository


def offline_error(name: str) -> DownloadFailed:
    return DownloadFailed(f"{name} is not on this machine, and offline mode is on", hint="unset HF_HUB_OFFLINE")


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in TRUE


def endpoints() -> list[str]:
    """The addresses of Hugging Face and its mirrors, in order. HF_ENDPOINT may be a list with commas."""
    addresses = [address.strip().rstrip("/") for address in os.environ.get("HF_ENDPOINT", "").split(",")]
    return [address for address in addresses if address] or [HUGGING_FACE]


def modelscope_endpoint() -> str:
    return os.environ.get("MODELSCOPE_ENDPOINT", "").rstrip("/") or MODELSCOPE


def hugging_face_token() -> str | None:
    """The access token of the user. Raises StorageFailed if its file is unreadable."""
    from huggingface_hub import get_token

    try:
        return get_token()
    except (OSError, UnicodeDecodeError) as error:
        hint = "check HF_HOME and HF_TOKEN_PATH, or set HF_TOKEN"
        raise StorageFailed(f"cannot read the access token: {error}", hint=hint) from error


def credentials() -> Credentials:
    """The access tokens of the user. Each belongs to one server: mirrors get none."""
    headers = {}
    if token := hugging_face_token():
        headers[origin(endpoints()[0])] = {"Authorization": f"Bearer {token}"}
    if token := os.environ.get("MODELSCOPE_API_TOKEN"):
        headers[origin(modelscope_endpoint())] = {"Authorization": f"Bearer {token}"}
    return Credentials(headers)


def _lookup_hugging_face(name: HubName, policy: Policy) -> Repository:
    """Metadata from the first endpoint that replies. A reply that the model does not exist is final."""
    failure: DownloadFailed | None = None
    for endpoint in endpoints():
        try:
            return _from_endpoint(endpoint, name, policy)
        except DownloadFailed as error:
            failure = failure or error
    assert failure is not None, "there is at least one endpoint"
    raise failure


def _from_endpoint(endpoint: str, name: HubName, policy: Policy) -> Repository:
    from huggingface_hub import HfApi

    # The token belongs to the first endpoint. A mirror does not get it.
    hugging_face_token()  # raises the error about its file, which huggingface_hub would raise as one of the network
    api = HfApi(endpoint=endpoint, token=None if endpoint == endpoints()[0] else False)
    revision = name.revision or MAIN

    def fetch() -> Any:
        return api.model_info(name.repo, revision=revision, files_metadata=True, timeout=policy.stall_timeout)

    info = _retry(policy, lambda: _once(endpoint, name, policy, fetch))
    try:
        return _hugging_face_repository(info, name, revision)
    except (ValueError, TypeError, AttributeError) as error:
        raise _malformed(endpoint, name.repo) from error


def _hugging_face_repository(info: Any, name: HubName, revision: str) -> Repository:
    """The repository of a reply of the hub. Raises ValueError, TypeError or AttributeError for malformed fields."""
    if not GIT_OID.fullmatch(info.sha):
        raise ValueError(f"commit {info.sha!r}")
    files = [_hugging_face_file(name.repo, info.sha, sibling) for sibling in info.siblings or []]
    return Repository(name.repo, info.sha, tuple(files), name.folder, "hf", revision, _licence(info.card_data))


def _licence(card: Any) -> str:
    """The licence in the metadata of a repository; empty if it has none. `other` has a name of its own."""
    licence = card.get("license") if card is not None else ""
    if licence == "other":
        licence = card.get("license_name") or licence
    return licence if isinstance(licence, str) else ""


def _hugging_face_file(repo: str, commit: str, sibling: Any) -> RemoteFile:
    sha256 = _hash(sibling.lfs.sha256, SHA256) if sibling.lfs else None
    git_oid = None if sha256 else _hash(sibling.blob_id, GIT_OID)
    path = f"/{repo}/resolve/{commit}/{quote(sibling.rfilename, errors='surrogatepass')}"
    first, *mirrors = [endpoint + path for endpoint in endpoints()]
    return RemoteFile(sibling.rfilename, _size(sibling.size), sha256, git_oid, first, tuple(mirrors))


def _once(endpoint: str, name: HubName, policy: Policy, fetch: Callable[[], Result]) -> Result:
    """Call huggingface_hub, and translate its errors. Raises Transient if another attempt may help."""
    from huggingface_hub import errors

    try:
        return _within(policy.lookup_timeout, fetch)
    except errors.HfHubHTTPError as error:
        raise _hub_error(endpoint, name, error) from error
    except errors.OfflineModeIsEnabled as error:
        raise offline_error(str(name)) from error
    except (errors.HTTPError, FutureTimeout, OSError) as error:
        raise Transient(f"cannot reach {endpoint}: {error or type(error).__name__}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Transient(f"{endpoint} sent a malformed reply for {name.repo}") from error


def _hub_error(endpoint: str, name: HubName, error: Any) -> Exception:
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return DownloadFailed(f"{name.repo} is gated: you do not have access", hint=GATED_HINT)
        case errors.RevisionNotFoundError():
            message = f"{name.repo} has no branch, tag or commit {name.revision or MAIN!r}"
            return ModelNotFound(message, hint="omit @revision to use the main branch", param="model")
        case errors.RepositoryNotFoundError():
            hint = hint_for_hub(name.repo) or "check the spelling; for a private model, set HF_TOKEN"
            return ModelNotFound(f"no model {name.repo!r} at {endpoint}", hint=hint, param="model")
    status = error.response.status_code
    if status in (401, 403):
        return DownloadFailed(f"{endpoint} denies access to {name.repo} ({status})", hint="check HF_TOKEN")
    message = f"{endpoint} returned status {status} for {name.repo}"
    if status >= 500 or status in (408, 429):
        return Transient(message)
    return DownloadFailed(message, hint="try again later; completed files are kept")


def _lookup_modelscope(name: HubName, policy: Policy) -> Repository:
    """Metadata from ModelScope's REST API. A reply without a commit gets a hash of the files in its place."""
    endpoint = modelscope_endpoint()
    revision = name.revision or MODELSCOPE_MAIN
    query = f"Revision={quote(revision, safe='')}&Recursive=True"
    url = f"{endpoint}/api/v1/models/{name.repo}/repo/files?{query}"

    def fetch() -> Any:
        return get_json(url, policy, credentials(), jsontext.parse, MAX_REPLY)

    reply = _retry(policy, lambda: _translated(endpoint, str(name), policy, fetch))
    try:
        if reply["Code"] != 200:
            raise ModelNotFound(
                f"no model {name.repo!r} with revision {revision!r} at {endpoint}",
                hint="check the spelling; for a private model, set MODELSCOPE_API_TOKEN",
                param="model",
            )
        return _modelscope_repository(reply["Data"], endpoint, name, revision)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _malformed(endpoint, name.repo) from error


def _modelscope_repository(data: Mapping[str, Any], endpoint: str, name: HubName, revision: str) -> Repository:
    """The repository of a reply. Raises ValueError, TypeError, KeyError or AttributeError for malformed fields."""
    base = f"{endpoint}/models/{name.repo}/resolve/{quote(revision, safe='')}/"
    files = []
    for entry in data["Files"]:
        if entry["Type"] != "tree":
            sha256 = _hash(entry.get("Sha256"), SHA256)
            url = base + quote(entry["Path"], errors="surrogatepass")
            files.append(RemoteFile(entry["Path"], _size(entry["Size"]), sha256, None, url))
    commit = (data.get("LatestCommitter") or {}).get("Id") or ""
    if not GIT_OID.fullmatch(commit):
        content = "\n".join(sorted(f"{file.name} {file.key}" for file in files))
        commit = hashlib.sha1(content.encode(errors="surrogatepass")).hexdigest()
    return Repository(name.repo, commit, tuple(files), name.folder, "ms", revision)


def _lookup_file(name: FileAddress, policy: Policy) -> Repository:
    """Metadata of one file: the reply to a request of its first byte has its size and its ETag."""
    host = urlsplit(name.url).hostname or ""

    def fetch() -> tuple[int, str]:
        return _probe(name.url, policy)

    size, etag = _retry(policy, lambda: _translated(host, name.url, policy, fetch))
    file = RemoteFile(name.file, size, None, None, name.url, etag=etag)
    commit = hashlib.sha1(file.key.encode()).hexdigest()
    return Repository(name.repo, commit, (file,), name.folder, "url")


def _probe(url: str, policy: Policy) -> tuple[int, str]:
    """Size and ETag of a file. Raises Transient or Refused."""
    connection = Connection(policy, Credentials())
    try:
        response = connection.open(url, {"Range": "bytes=0-0"})
        response.close()
        total = response.headers.get("content-range", "").rpartition("/")[2]
        if response.status_code == 200:
            total = response.headers.get("content-length", "")
        if not total.isdigit():
            raise Refused("the server does not tell the size of the file")
        return _size(int(total)), response.headers.get("etag", "")
    finally:
        connection.close()


def _translated(server: str, name: str, policy: Policy, fetch: Callable[[], Result]) -> Result:
    """Call our own HTTP client, and translate its errors. Raises Transient if another attempt may help."""
    try:
        return _within(policy.lookup_timeout, fetch)
    except Refused as error:
        if error.status in (404, 410):
            hint = "check the spelling; for a private model, set MODELSCOPE_API_TOKEN" if name.startswith("ms:") else ""
            hint = hint or "check the spelling"
            raise ModelNotFound(f"no model {name!r} at {server}", hint=hint, param="model") from error
        raise DownloadFailed(f"cannot download {name}: {error}", hint=RETRY_HINT) from error
    except FutureTimeout as error:
        raise Transient(f"cannot reach {server}: no reply for {policy.lookup_timeout:.0f} s") from error
    except (ValueError, Changed) as error:
        raise Transient(f"{server} sent a malformed reply for {name}") from error


def _retry(policy: Policy, attempt: Callable[[], Result]) -> Result:
    """Call `attempt` until it returns, a few times. Raises DownloadFailed with the last reason."""
    for number in itertools.count(2):
        try:
            return attempt()
        except Transient as failure:
            if number > policy.lookup_attempts:
                raise DownloadFailed(str(failure), hint=RETRY_HINT) from failure
            time.sleep(min(wait_before(number, failure, policy), policy.longest_wait))
    raise AssertionError("the loop ends with a result or an error")


def _within(seconds: float, function: Callable[[], Result]) -> Result:
    """The result of a function, which runs in a thread. Raises TimeoutError: a server may send one byte per second."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future.result(seconds)


def _malformed(server: str, name: str) -> AppError:
    return DownloadFailed(f"{server} sent a malformed reply for {name}", hint="try again later, or set HF_ENDPOINT")


def _size(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**60:
        return value
    raise ValueError(f"file size {value!r}")


def _hash(value: object, form: re.Pattern[str]) -> str | None:
    """The hash in lower case; None if it is missing. Raises ValueError for another value."""
    if not value:
        return None
    if isinstance(value, str) and form.fullmatch(value.lower()):
        return value.lower()
    raise ValueError(f"hash {value!r}")
