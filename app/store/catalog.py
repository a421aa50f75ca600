"""The usable models: the bundled one, and the complete ones in the shared Hugging Face cache.

    models--org--repo/
        refs/main             a commit
        snapshots/<commit>/   links into blobs/, one as soon as its file is complete

This module reads the cache without huggingface_hub, because importing that is slow.
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
GUIDE_DESCRIPTION = "tiny built-in model: answers questions about localllm"

SEGMENT = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"  # the hub's maximum length
NAME = re.compile(rf"(?P<repo>(?:{SEGMENT}/)?{SEGMENT})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{{0,199}}))?")
SHORTEST_COMMIT = 7


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model on disk."""

    id: str  # guide, org/repo or org/repo@revision
    path: Path  # the folder with config.json
    bundled: bool = False
    revision: str = ""  # commit, in the Hugging Face cache
    size: int = 0  # bytes on disk
    packed: int = 0  # bytes of cached quantised weights; not in size
    context: int = 0  # maximum context of the model in tokens; 0: unknown
    description: str = ""


def available() -> list[ModelRef]:
    """Every complete model, the bundled one first."""
    bundled = [_bundled()] if is_complete(paths.guide_dir()) else []
    repos = sorted(paths.hub_cache_dir().glob("models--*"), key=lambda folder: folder.name.lower())
    return bundled + [model for folder in repos for model in _snapshots(folder)]


def resolve(name: str, *, allow_path: bool = False) -> ModelRef:
    """The model of this name. With `allow_path`, also a folder (with a leading /, ./, ../ or ~).

    Raises ModelNotFound, with similar names or the command that downloads the model as its hint.
    """
    if allow_path and is_path(name):
        return _from_path(Path(name).expanduser())
    if name == GUIDE and is_complete(paths.guide_dir()):
        return _bundled()
    parts = NAME.fullmatch(name)
    if parts:
        repo = parts["repo"]
        revision = parts["revision"] or MAIN
        folder = paths.hub_cache_dir() / f"models--{repo.replace('/', '--')}"
        commit = refs(folder).get(revision, revision)
        matching = [model for model in _snapshots(folder) if is_commit(commit, model.revision)]
        if len(matching) == 1:
            return matching[0]
    raise ModelNotFound(f"model {name[:200]!r} is not on this machine", hint=_hint(name), param="model")


def is_commit(revision: str, commit: str) -> bool:
    """True if `revision` is the commit, or a long enough prefix of it."""
    return len(revision) >= SHORTEST_COMMIT and commit.startswith(revision)


def is_path(name: str) -> bool:
    return name in {".", "..", "~"} or name.startswith(("/", "./", "../", "~/"))


def is_complete(folder: Path) -> bool:
    """True if the folder has a config and every weight file of the index (a dangling link is a missing file)."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(file.is_file() for file in folder.glob("*.safetensors"))
    weight_map = _read_json(index).get("weight_map")
    shards = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    return bool(shards) and all(isinstance(shard, str) and (folder / shard).is_file() for shard in shards)


def refs(repo_folder: Path) -> dict[str, str]:
    """Branch or tag -> commit of one repo in the cache, main first."""
    root = repo_folder / "refs"
    commits = {
        str(file.relative_to(root)): file.read_text("ascii", "replace").strip()
        for file in root.rglob("*")
        if file.is_file()
    }
    return dict(sorted(commits.items(), key=lambda item: (item[0] != MAIN, item[0])))


def _bundled() -> ModelRef:
    return _describe(GUIDE, paths.guide_dir(), bundled=True, description=GUIDE_DESCRIPTION)


def _snapshots(repo_folder: Path) -> Iterator[ModelRef]:
    """The complete snapshots of one repo: main as `org/repo`, others with their branch, tag or short commit."""
    _, _, rest = repo_folder.name.partition("--")
    repo = rest.replace("--", "/", 1)
    names = {commit: name for name, commit in reversed(refs(repo_folder).items())}
    for snapshot in sorted((repo_folder / "snapshots").glob("*")):
        if is_complete(snapshot):
            label = names.get(snapshot.name, snapshot.name[:12])
            yield _describe(repo if label == MAIN else f"{repo}@{label}", snapshot, revision=snapshot.name)


def _from_path(folder: Path) -> ModelRef:
    folder = folder.absolute()
    if not folder.is_dir():
        raise ModelNotFound(
            f"folder {folder} does not exist", hint="the path of a model is a folder with config.json", param="model"
        )
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"{folder} is not a model folder: config.json is missing",
            hint="a model folder has config.json, tokenizer.json and *.safetensors, as on Hugging Face",
            param="model",
        )
    return _describe(str(folder), folder, files=folder.glob("*"))  # no subfolders: they may be the whole disk


def _describe(
    name: str,
    folder: Path,
    *,
    bundled: bool = False,
    revision: str = "",
    description: str = "",
    files: Iterable[Path] | None = None,
) -> ModelRef:
    config = _read_json(folder / "config.json")
    packed = paths.packed_dir(folder)
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
    """The JSON object in the file; empty if it has none, so that one broken repo does not hide the others."""
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _hint(name: str) -> str:
    ids = [model.id for model in available()]
    by_repo = {id.partition("/")[2].lower() or id: id for id in ids}
    near = difflib.get_close_matches(name.lower(), [id.lower() for id in ids], n=3, cutoff=0.6)
    similar = [id for id in ids if id.lower() in near]
    similar += [id for repo, id in by_repo.items() if name and name.lower() in repo and id not in similar]
    if similar:
        return f"did you mean {' or '.join(similar[:3])}?"
    if NAME.fullmatch(name) and "/" in name:
        return f"to download it: localllm pull {name}"
    return "localllm list shows the models on this machine; localllm pull org/repo downloads one"
