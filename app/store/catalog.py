"""Which models can be used now: the bundled one, and the whole ones in the shared Hugging Face cache.

    models--org--repo/
        refs/main             a commit
        snapshots/<commit>/   links into blobs/, made file by file as each is complete

The cache is read here with nothing but the file system: importing huggingface_hub takes a quarter of a second.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import paths
from ..errors import ModelNotFound

GUIDE = "guide"
MAIN = "main"
GUIDE_SAYS = "the tiny built-in model: knows localllm and little else"

PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"  # as long as the hub lets them be
NAME = re.compile(rf"(?P<repo>(?:{PART}/)?{PART})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{{0,199}}))?")
SHORTEST_COMMIT = 7


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model on disk."""

    id: str  # what clients call it: guide, org/repo or org/repo@revision
    path: Path  # the folder with config.json
    bundled: bool = False
    revision: str = ""  # commit, in the Hugging Face cache
    size: int = 0  # bytes on disk
    packed: int = 0  # bytes of weights made smaller on load and kept; not in size
    context: int = 0  # tokens, of the model; 0: its files do not say
    description: str = ""


def available() -> list[ModelRef]:
    """Every model that could be loaded now, the bundled one first. Half-downloaded ones are not listed."""
    bundled = [_bundled()] if whole(paths.guide_dir()) else []
    repos = sorted(paths.hub_cache_dir().glob("models--*"), key=lambda folder: folder.name.lower())
    return bundled + [model for folder in repos for model in _in_cache(folder)]


def resolve(name: str, *, allow_path: bool = False) -> ModelRef:
    """The model of this name; with `allow_path` also a folder, written with a leading /, ./, ../ or ~.

    Raises ModelNotFound with near matches, or with the command that would fetch it.
    """
    if allow_path and is_path(name):
        return _at_path(Path(name).expanduser())
    if name == GUIDE and whole(paths.guide_dir()):
        return _bundled()
    asked = NAME.fullmatch(name)
    if asked:
        repo, revision = asked["repo"], asked["revision"] or MAIN
        folder = paths.hub_cache_dir() / f"models--{repo.replace('/', '--')}"
        commit = refs(folder).get(revision, revision)
        matching = [model for model in _in_cache(folder) if is_commit(commit, model.revision)]
        if len(matching) == 1:
            return matching[0]
    raise ModelNotFound(f"no model {name[:200]!r} here", hint=_hint(name), param="model")


def is_commit(asked: str, commit: str) -> bool:
    """The whole commit, or enough of its beginning."""
    return len(asked) >= SHORTEST_COMMIT and commit.startswith(asked)


def is_path(name: str) -> bool:
    return name in {".", "..", "~"} or name.startswith(("/", "./", "../", "~/"))


def whole(folder: Path) -> bool:
    """Has a config and every weight file it names (a link to a missing file counts as missing)."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(file.is_file() for file in folder.glob("*.safetensors"))
    weight_map = _read_json(index).get("weight_map")
    shards = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    return bool(shards) and all(isinstance(shard, str) and (folder / shard).is_file() for shard in shards)


def refs(repo_folder: Path) -> dict[str, str]:
    """Branch or tag → commit of one repo in the cache, main first."""
    root = repo_folder / "refs"
    found = {
        str(file.relative_to(root)): file.read_text("ascii", "replace").strip()
        for file in root.rglob("*")
        if file.is_file()
    }
    return dict(sorted(found.items(), key=lambda item: (item[0] != MAIN, item[0])))


def _bundled() -> ModelRef:
    return _describe(GUIDE, paths.guide_dir(), bundled=True, description=GUIDE_SAYS)


def _in_cache(repo_folder: Path) -> Iterator[ModelRef]:
    """Whole snapshots of one repo: `org/repo` is main, others carry their branch, tag or short commit."""
    _, _, rest = repo_folder.name.partition("--")
    repo = rest.replace("--", "/", 1)
    names = {commit: name for name, commit in reversed(refs(repo_folder).items())}
    for snapshot in sorted((repo_folder / "snapshots").glob("*")):
        if whole(snapshot):
            label = names.get(snapshot.name, snapshot.name[:12])
            yield _describe(repo if label == MAIN else f"{repo}@{label}", snapshot, revision=snapshot.name)


def _at_path(folder: Path) -> ModelRef:
    folder = folder.absolute()
    if not folder.is_dir():
        raise ModelNotFound(f"no folder {folder}", hint="a path must lead to a folder with config.json", param="model")
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"{folder} is no model folder: it has no config.json",
            hint="a model's folder has config.json, tokenizer.json and *.safetensors, as on Hugging Face",
            param="model",
        )
    return _describe(str(folder), folder, files=folder.glob("*"))  # what lies deeper may be the whole disk


def _describe(
    name: str,
    folder: Path,
    *,
    bundled: bool = False,
    revision: str = "",
    description: str = "",
    files: Iterable[Path] | None = None,
) -> ModelRef:
    config, packed = _read_json(folder / "config.json"), paths.packed_dir(folder)
    text = config.get("text_config")
    context = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    return ModelRef(
        id=name,
        path=folder,
        bundled=bundled,
        revision=revision,
        size=sum(
            file.stat().st_size for file in files or folder.rglob("*") if file.is_file() and packed not in file.parents
        ),
        packed=sum(file.stat().st_size for file in packed.glob("*")),
        context=context if isinstance(context, int) else 0,
        description=description or str(config.get("model_type", "")),
    )


def _read_json(file: Path) -> dict[str, object]:
    """The file's object; empty when it has none, so that one broken repo does not hide the others."""
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _hint(name: str) -> str:
    here = [model.id for model in available()]
    by_repo = {known.partition("/")[2].lower() or known: known for known in here}
    near = difflib.get_close_matches(name.lower(), [known.lower() for known in here], n=3, cutoff=0.6)
    close = [known for known in here if known.lower() in near]
    close += [known for short, known in by_repo.items() if name and name.lower() in short and known not in close]
    if close:
        return f"did you mean {' or '.join(close[:3])}?"
    if NAME.fullmatch(name) and "/" in name:
        return f"localllm pull {name} fetches it"
    return "localllm list shows the models here; localllm pull org/repo fetches one"
