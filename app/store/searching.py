"""Search for models to download: in the catalog, and on Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...engine.tensorfiles import ITEM_BYTES
from ..errors import DownloadFailed, InvalidRequest
from . import catalog
from .lookup import endpoints, hugging_face_token, is_offline
from .names import parse_hub

SECONDS = 10.0  # maximum wait for an answer of the hub
FIELDS = ("downloads", "likes", "tags", "safetensors", "gated")  # of the results; a mirror may ignore the request


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository on Hugging Face."""

    id: str
    downloads: int
    licence: str
    likes: int = 0
    size: int = 0  # bytes of the weights; 0: unknown
    gated: bool = False  # the hub gives access to accounts that accepted the licence


def search_catalog(text: str) -> dict[str, catalog.Entry]:
    """The entries with every word of `text` in the short name, the repository or the description."""
    words = text.lower().split()
    entries = {}
    for name, entry in catalog.entries().items():
        description = f"{name} {entry.repository} {entry.description}".lower()
        if all(word in description for word in words):
            entries[name] = entry
    return entries


def search_hub(text: str, limit: int) -> list[Repository]:
    """The most downloaded repositories with safetensors weights for text generation. Raises DownloadFailed.

    The first endpoint that replies has the results. Only the first endpoint gets the token.
    """
    if is_offline():
        raise DownloadFailed("cannot search Hugging Face: offline mode is on", hint="unset HF_HUB_OFFLINE")
    failure: DownloadFailed | None = None
    for number, endpoint in enumerate(endpoints()):
        try:
            return _search(endpoint, text, limit, with_token=number == 0)
        except DownloadFailed as error:
            failure = failure or error
    assert failure is not None, "there is at least one endpoint"
    raise failure


def _search(endpoint: str, text: str, limit: int, with_token: bool) -> list[Repository]:
    import httpx
    from huggingface_hub.utils import build_hf_headers

    params: dict[str, str | int | tuple[str, ...]] = {
        "search": text,
        "limit": limit,
        "sort": "downloads",
        "filter": "safetensors,text-generation",
        "expand": FIELDS,
    }
    if with_token:
        hugging_face_token()  # raises the error about its file
    headers = build_hf_headers(token=None if with_token else False)
    try:
        # huggingface_hub repeats a failed request for 23 seconds, too long for a search
        response = httpx.get(f"{endpoint}/api/models", params=params, headers=headers, timeout=SECONDS)
        response.raise_for_status()
        repositories = [_repository(model) for model in response.json()]
    except (httpx.HTTPError, OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        hint = "check the network and the proxy settings; without words, localllm search shows the catalog"
        reason = str(error).split("\n")[0] or type(error).__name__
        raise DownloadFailed(f"cannot search {endpoint}: {reason}", hint=hint) from error
    return [repository for repository in repositories if _is_name(repository.id)]


def _is_name(id: str) -> bool:
    """Whether a text of the hub is the name of a repository that localllm can download."""
    try:
        return str(parse_hub(id)) == id
    except InvalidRequest:
        return False


def _repository(model: dict[str, Any]) -> Repository:
    tags = model.get("tags") or []
    licences = [tag.removeprefix("license:") for tag in tags if str(tag).startswith("license:")]
    return Repository(
        str(model["id"]),
        int(model.get("downloads") or 0),
        "".join(licences[:1]),
        int(model.get("likes") or 0),
        _size(model.get("safetensors") or {}),
        bool(model.get("gated")),
    )


def _size(safetensors: dict[str, Any]) -> int:
    """Bytes of the weights, from the number of values of each dtype; 0 if a dtype is unknown."""
    counts = safetensors.get("parameters") or {}
    if any(dtype not in ITEM_BYTES for dtype in counts):
        return 0
    return sum(ITEM_BYTES[dtype] * int(count) for dtype, count in counts.items())
