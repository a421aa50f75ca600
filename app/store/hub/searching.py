"""Search for models to download: in the catalog, and on Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Literal
from urllib.parse import urlencode

import msgspec

from ....engine.files.tensor_files import ITEM_BYTES
from ...errors import AppError, DownloadFailed, InvalidRequest
from .. import catalog
from ..names import parse_hub
from ..records import CatalogMatch, HubMatch, SearchResult
from ..selection import gguf_quants
from ..transfer.failures import Refused
from ..transfer.policy import Policy
from .hubs import endpoints, is_offline
from .metadata import convert, fetch_json

Format = Literal["safetensors", "gguf"]

HINT = "check the network and the proxy settings; without words, localllm search shows the catalog"
SECONDS = 5.0  # maximum wait for an answer of the hub, and maximum of Retry-After
POLICY = Policy(lookup_attempts=2, lookup_timeout=SECONDS, connect_timeout=SECONDS, longest_retry_after=SECONDS)
_FIELDS = ("downloads", "likes", "tags", "gated")  # of the results; a mirror may ignore the request
# Format -> the tags that its repositories have, and the fields of its results. Many GGUF repositories have no task.
_REQUESTS: Mapping[Format, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "safetensors": ("safetensors,text-generation", (*_FIELDS, "safetensors")),
        "gguf": ("gguf", (*_FIELDS, "siblings", "pipeline_tag")),
    }
)
# Tasks of repositories whose GGUF files may be language models; the others make images, speech or embeddings.
_TEXT_TASKS = ("", "text-generation", "image-text-to-text", "any-to-any", "question-answering", "translation")


class _Sibling(msgspec.Struct):
    rfilename: str


class _Parameters(msgspec.Struct):
    parameters: dict[str, int] | None = None


class _Model(msgspec.Struct):
    """The fields of a result. The hub leaves out those that a repository does not have."""

    id: str
    downloads: int | None = None
    likes: int | None = None
    tags: list[str] | None = None
    gated: bool | str | None = None
    pipeline_tag: str | None = None
    siblings: list[_Sibling] | None = None
    safetensors: _Parameters | None = None


def search(query: str, limit: int, offline: bool) -> tuple[SearchResult, AppError | None]:
    """The entries of the catalog, and repositories on Hugging Face unless `query` is empty. `limit`: of each format.

    The error is the reason why the hub was not searched.
    """
    error: AppError | None = None
    repositories: list[HubMatch] = []
    if query and not offline:
        try:
            repositories = search_hub(query, limit)
        except AppError as failure:
            error = failure
    entries = [_match(name, entry) for name, entry in search_catalog(query).items()]
    return SearchResult(catalog=entries, hub=repositories, error=error.message if error else None), error


def _match(name: str, entry: catalog.Entry) -> CatalogMatch:
    sizes = {"size": round(entry.size * catalog.GB), "memory": round(entry.memory * catalog.GB)}
    return CatalogMatch(name=name, **{**msgspec.structs.asdict(entry), **sizes})


def search_catalog(text: str) -> dict[str, catalog.Entry]:
    """The entries with every word of `text` in the short name, the repository or the description."""
    words = text.lower().split()
    entries = {}
    for name, entry in catalog.entries().items():
        description = f"{name} {entry.repository} {entry.description}".lower()
        if all(word in description for word in words):
            entries[name] = entry
    return entries


def search_hub(text: str, limit: int) -> list[HubMatch]:
    """The most downloaded repositories with safetensors weights for text generation, then those with GGUF models only.

    `limit`: of each format. Raises DownloadFailed. The first endpoint that replies has the results. Only the first
    endpoint gets the token.
    """
    if is_offline():
        raise DownloadFailed("cannot search Hugging Face: offline mode is on", hint="unset HF_HUB_OFFLINE")
    failure: DownloadFailed | None = None
    for endpoint in endpoints():
        try:
            return _search(endpoint, text, limit)
        except DownloadFailed as error:
            failure = failure or error
    assert failure is not None, "there is at least one endpoint"
    raise failure


def _search(endpoint: str, text: str, limit: int) -> list[HubMatch]:
    repositories: dict[str, HubMatch] = {}
    with ThreadPoolExecutor(len(_REQUESTS)) as pool:
        replies = pool.map(lambda format: _request(endpoint, text, limit, format), _REQUESTS)
    for repository in [repository for reply in replies for repository in reply]:
        other = repositories.get(repository.id)
        repositories[repository.id] = repository if other is None else _with_gguf(other, repository)
    return list(repositories.values())


def _request(endpoint: str, text: str, limit: int, format: Format) -> list[HubMatch]:
    """The repositories of one format."""
    tags, fields = _REQUESTS[format]
    query = {"search": text, "limit": limit, "sort": "downloads", "filter": tags, "expand": fields}
    task = f"search {endpoint}"
    try:
        reply = fetch_json(task, f"{endpoint}/api/models?{urlencode(query, doseq=True)}", POLICY)
    except (Refused, DownloadFailed) as error:
        message = error.message if isinstance(error, DownloadFailed) else f"cannot {task}: {error}"
        raise DownloadFailed(message, hint=HINT) from error
    models = convert(task, reply, list[_Model])
    repositories = [_repository(model, format) for model in models if (model.pipeline_tag or "") in _TEXT_TASKS]
    return [repository for repository in repositories if _is_name(repository.id)]


def _with_gguf(repository: HubMatch, gguf: HubMatch) -> HubMatch:
    """A repository that has both formats. `gguf`: the same repository as a result of the search for GGUF models."""
    formats = tuple(dict.fromkeys([*repository.formats, *gguf.formats]))
    return msgspec.structs.replace(repository, formats=formats, quants=gguf.quants)


def _is_name(id: str) -> bool:
    """Whether a text of the hub is the name of a repository that localllm can download."""
    try:
        return str(parse_hub(id)) == id
    except InvalidRequest:
        return False


def _repository(model: _Model, format: Format) -> HubMatch:
    licences = [tag.removeprefix("license:") for tag in model.tags or [] if tag.startswith("license:")]
    repository = HubMatch(
        id=model.id,
        downloads=model.downloads or 0,
        licence="".join(licences[:1]),
        likes=model.likes or 0,
        size=_size((model.safetensors and model.safetensors.parameters) or {}),
        gated=bool(model.gated),
        formats=(format,),
    )
    if format == "safetensors":
        return repository
    files = [sibling.rfilename for sibling in model.siblings or []]
    return msgspec.structs.replace(repository, quants=tuple(sorted(gguf_quants(files), key=_bits)))


def _bits(quant: str) -> tuple[int, str]:
    """Sorts quantisations by the bits of a weight. The hub does not send the sizes of the files."""
    digits = re.search(r"\d+", quant)
    return (int(digits[0]) if digits else 0, quant)


def _size(counts: Mapping[str, int]) -> int:
    """Bytes of the weights, from the number of values of each dtype; 0 if a dtype is unknown."""
    if any(dtype not in ITEM_BYTES for dtype in counts):
        return 0
    return sum(ITEM_BYTES[dtype] * count for dtype, count in counts.items())
