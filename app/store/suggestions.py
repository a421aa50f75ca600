"""The names that a user may mean: near matches among the models on this machine, the aliases and the catalog."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ..errors import InvalidRequest
from . import catalog, preferences
from .names import LOCAL, HubName, LocalPath, ShortName, parse

MAX_NAMES = 3
LOCAL_CUTOFF = 0.6  # cutoff of difflib; low, because there are few names on this machine
CATALOG_CUTOFF = 0.75
REPOSITORY_CUTOFF = 0.85
NO_MATCH = "localllm list shows the models on this machine; localllm search shows models to download"


def hint(text: str, local: Iterable[str]) -> str:
    """The hint about a model that is not on this machine: similar names, or the command that downloads it.

    `local`: the ids of the models on this machine.
    """
    try:
        name = parse(text)
    except InvalidRequest as error:
        return error.hint
    target = catalog.expand(name)
    if isinstance(target, LocalPath) and not isinstance(name, LocalPath):
        return f"{text} is an alias of {target}, which is not the folder of a model"
    if target not in (None, name):  # a short name or an alias of a model that is not on this machine
        return f"to download it: localllm pull {text}"
    if isinstance(name, HubName):
        return _hint_for_repository(name, text, local)
    if isinstance(name, ShortName):
        return _hint_for_short_name(name, text, local)
    return NO_MATCH


def hint_for_stored(text: str, stored: Iterable[str]) -> str:
    """The hint about a name that is not stored. `stored`: the ids of models, adapters and unfinished downloads."""
    candidates = [*stored, *preferences.read().aliases]
    revisions = [name for name in candidates if name.startswith(f"{text}@")]
    matches = revisions[:MAX_NAMES] or similar(text, [name for name in candidates if name != text])
    return _did_you_mean(matches) or "localllm list shows the models on this machine"


def hint_for_adapter(text: str, local: Iterable[str]) -> str:
    """The hint about an adapter that is not on this machine. `local`: the ids of the adapters on this machine."""
    matches = difflib.get_close_matches(text, list(local), n=MAX_NAMES, cutoff=LOCAL_CUTOFF)
    if matches:
        return _did_you_mean(matches)
    if "/" in text:
        return f"to download it: localllm pull {text}; a folder has a leading ./ or /"
    return "localllm adapters list shows the adapters on this machine; a folder has a leading ./ or /"


def hint_for_hub(repository: str) -> str:
    """The hint about a repository that a hub does not have: a similar repository of the catalog; empty without one."""
    others = [name for name in _similar_repositories(repository) if not name.startswith(f"{repository}:")]
    return _did_you_mean(others)


def similar(text: str, names: Iterable[str]) -> list[str]:
    """The names that are spelled like `text`, the most similar first, then those that contain `text`."""
    text = text.lower()
    ratios = {name: _ratio(text, name.lower()) for name in names}
    matches = [name for name, ratio in ratios.items() if ratio >= LOCAL_CUTOFF]
    matches.sort(key=lambda name: -ratios[name])
    containing = [name for name in ratios if text in name.lower().partition("/")[2] and name not in matches]
    return [*matches, *containing][:MAX_NAMES]


def _ratio(text: str, name: str) -> float:
    """The similarity of two names, 0 to 1. An organisation that both have does not count."""
    organisation, slash, repo = text.partition("/")
    if slash and name.startswith(f"{organisation}/"):
        text = repo
        name = name.removeprefix(f"{organisation}/")
    return difflib.SequenceMatcher(None, name, text).ratio()


def _hint_for_repository(name: HubName, text: str, local: Iterable[str]) -> str:
    matches = [match for match in similar(text, local) if match != text]
    if name.repo.startswith(f"{LOCAL}/"):
        return _did_you_mean(matches) or NO_MATCH
    download = f"to download it: localllm pull {text}"
    if text.lower().endswith(".gguf"):
        download = f"no file has this path; {download}"
    if not matches:
        matches = [repository for repository in _similar_repositories(name.repo) if repository != name.repo]
    return f"{_did_you_mean(matches)} {download}".strip()


def _hint_for_short_name(name: ShortName, text: str, local: Iterable[str]) -> str:
    names = [*local, *preferences.read().aliases]
    family = catalog.tags(name.family)
    if not family:
        matches = similar(text, names) or similar(name.family, names)
        if matches:
            return _did_you_mean(matches)
    return _with_sizes(_similar_short_names(text, family)) or NO_MATCH


def _similar_short_names(text: str, family: list[str]) -> list[str]:
    """The short names that are spelled like `text`. `family`: the short names with the part before its colon."""
    if family and ":" not in text:
        return family
    matches = difflib.get_close_matches(text.lower(), catalog.entries(), n=MAX_NAMES, cutoff=CATALOG_CUTOFF)
    return matches or family or _tags_of_similar_family(text.partition(":")[0])


def _tags_of_similar_family(family: str) -> list[str]:
    families = {name.partition(":")[0] for name in catalog.entries()}
    matches = difflib.get_close_matches(family.lower(), sorted(families), n=1, cutoff=CATALOG_CUTOFF)
    return catalog.tags(matches[0]) if matches else []


def _similar_repositories(repository: str) -> list[str]:
    """The repositories of the catalog that are spelled like `repository`."""
    repositories = {str(entry.target).lower(): str(entry.target) for entry in catalog.entries().values()}
    matches = difflib.get_close_matches(repository.lower(), repositories, n=1, cutoff=REPOSITORY_CUTOFF)
    return [repositories[match] for match in matches]


def _did_you_mean(names: list[str]) -> str:
    return f"did you mean {' or '.join(names)}?" if names else ""


def _with_sizes(names: list[str]) -> str:
    """The short names with the sizes of the catalog; empty without a name."""
    if not names:
        return ""
    entries = catalog.entries()
    labels = [f"{name} ({entries[name].size:g} GB)" if entries[name].size else name for name in names]
    return f"short names, with approximate sizes: {', '.join(labels)}"
