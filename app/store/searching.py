"""Search for models to download: in the catalog, and on Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import DownloadFailed
from . import catalog
from .lookup import endpoints, is_offline

SECONDS = 10.0  # maximum wait for an answer of the hub


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository on Hugging Face."""

    id: str
    downloads: int
    licence: str


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

    filters = {"search": text, "limit": str(limit), "sort": "downloads", "filter": "safetensors,text-generation"}
    headers = build_hf_headers(token=None if with_token else False)
    try:
        # huggingface_hub repeats a failed request for 23 seconds, too long for a search
        response = httpx.get(f"{endpoint}/api/models", params=filters, headers=headers, timeout=SECONDS)
        response.raise_for_status()
        return [_repository(model) for model in response.json()]
    except (httpx.HTTPError, OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        hint = "check the network and the proxy settings; without words, localllm search shows the catalog"
        reason = str(error).split("\n")[0] or type(error).__name__
        raise DownloadFailed(f"cannot search {endpoint}: {reason}", hint=hint) from error


def _repository(model: dict[str, Any]) -> Repository:
    tags = model.get("tags") or []
    licences = [tag.removeprefix("license:") for tag in tags if str(tag).startswith("license:")]
    return Repository(str(model["id"]), int(model.get("downloads") or 0), "".join(licences[:1]))
