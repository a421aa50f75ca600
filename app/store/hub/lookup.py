"""Looks up a name at its hub: which files a revision has. No file content is downloaded here."""

from __future__ import annotations

import hashlib
from urllib.parse import urlsplit

from ...errors import DownloadFailed, ModelNotFound
from ..names import FileAddress, HubName
from ..remote import RemoteFile, Repository, check_names
from ..transfer.failures import Refused
from ..transfer.http import Credentials
from ..transfer.policy import Policy, from_environment
from .heads import request_head
from .hubs import RETRY_HINT, is_offline, offline_error
from .hugging_face import lookup_hugging_face
from .metadata import attempt
from .modelscope import lookup_modelscope


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
        repository = lookup_modelscope(name, policy)
    else:
        repository = lookup_hugging_face(name, policy)
    check_names(repository.name, [file.name for file in repository.files])
    return repository


def _lookup_file(name: FileAddress, policy: Policy) -> Repository:
    """Metadata of one file: the reply to a request of its first byte has its size and its ETag."""
    try:
        head = attempt(f"look up {name}", policy, lambda: request_head(name.url, policy, Credentials()))
    except Refused as refusal:
        if refusal.status in (404, 410):
            message = f"no model {name.url!r} at {urlsplit(name.url).hostname}"
            raise ModelNotFound(message, hint="check the spelling", param="model") from refusal
        raise DownloadFailed(f"cannot look up {name}: {refusal}", hint=RETRY_HINT) from refusal
    file = RemoteFile(name.file, head.size, None, None, name.url, etag=head.etag)
    commit = hashlib.sha1(file.key.encode()).hexdigest()
    return Repository(name.repo, commit, (file,), name.folder, "url")
