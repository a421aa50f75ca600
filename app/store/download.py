"""`pull`: the files a model needs, from Hugging Face into the shared cache, so that an interruption shows as such.

The small files come first and the weights last, one after the other; the branch's name is put on the new commit when
all are there. Until then `list` and `chat` see what they saw before.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.modelfiles import INDEX, SINGLE
from .. import paths
from ..errors import ModelUnusable, StorageFailed
from ..sizes import size
from . import catalog, hub

if TYPE_CHECKING:
    from huggingface_hub.utils import tqdm

# Whatever a loader reads must be here; a `*` stays within one folder.
SMALL = (
    "*.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "tokenizer.model",
    "*.txt",
    "*.md",
    "LICENSE*",
    "NOTICE*",
)
WEIGHTS = "*.safetensors"
UNSAFE = ("*.bin", "*.pt", "*.pth", "*.ckpt")  # pickles: loading one runs code
OTHER_REPO = "look for a repo of the same model with .safetensors files"
HEADROOM = 64 * 2**20  # bytes left free on the disk


@dataclass(frozen=True, slots=True)
class RemoteFile:
    name: str
    size: int


def pull(name: str, tell: Callable[[str], None]) -> catalog.ModelRef:
    """Fetch what is missing of `org/repo[@revision]` and give the model. Progress bars go to standard error.

    Raises InvalidRequest, ModelNotFound, ModelUnusable (no weights we may load), DownloadFailed or StorageFailed.
    """
    asked = hub.parse(name)
    from huggingface_hub import HfApi, hf_hub_download

    revision = asked.revision or catalog.MAIN
    with hub.translated(asked):
        info = HfApi().model_info(asked.repo, revision=revision, files_metadata=True)
        assert info.sha is not None, "the hub always names the commit"
        files = choose(asked.repo, [RemoteFile(file.rfilename, file.size or 0) for file in info.siblings or []])
        snapshot = asked.folder / "snapshots" / info.sha
        missing = [file for file in files if not (snapshot / file.name).exists()]
        _check_space(sum(file.size for file in missing))
        if missing:
            tell(f"fetching {len(missing)} of {len(files)} files of {asked.repo}, commit {info.sha[:12]}")
        for number, file in enumerate(missing, start=1):
            bar = _titled(f"{number}/{len(missing)} {file.name}")
            cache = paths.hub_cache_dir()
            hf_hub_download(asked.repo, file.name, revision=info.sha, cache_dir=cache, tqdm_class=bar)
        if not catalog.is_commit(revision, info.sha):
            _name_commit(asked.folder / "refs" / revision, info.sha)
    return catalog.resolve(f"{asked.repo}@{info.sha}")


def _titled(title: str) -> type[tqdm]:
    """The hub library's progress bar, with our title: it would show the end of a path."""
    from huggingface_hub.utils import tqdm

    class Titled(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "desc": title})

    return Titled


def choose(repo: str, files: list[RemoteFile]) -> list[RemoteFile]:
    """The files to fetch, weights last. Raises ModelUnusable where there is nothing we may load."""
    names = {file.name for file in files}
    weights = [file for file in files if _fits(file.name, WEIGHTS)]
    if not weights:
        raise ModelUnusable(f"{repo} {_instead(names)}", hint=OTHER_REPO)
    if "config.json" not in names:
        raise ModelUnusable(
            f"{repo} has no config.json, so it is not a whole model", hint="pull its base model instead"
        )
    if not names & {SINGLE, INDEX}:
        problem = f"{repo} has its weights as {weights[0].name}, but neither {SINGLE} nor {INDEX}"
        raise ModelUnusable(problem, hint=OTHER_REPO)
    # Some repos carry the same weights twice: `model*.safetensors` is the form that config.json belongs to.
    weights = [file for file in weights if file.name.startswith("model")] or weights
    small = [file for file in files if any(_fits(file.name, pattern) for pattern in SMALL)]
    return sorted(small, key=lambda file: file.name) + sorted(weights, key=lambda file: file.name)


def _fits(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)


def _instead(names: set[str]) -> str:
    """Why a repo without safetensors is refused."""
    pickles = sorted(name for name in names if any(fnmatch(name, pattern) for pattern in UNSAFE))
    if pickles:
        return f"has pickle weights only ({pickles[0]}), and loading those would run code from the repo"
    if any(name.endswith(".gguf") for name in names):
        return "has GGUF weights only, which this version cannot read"
    return "has no safetensors weights"


def _check_space(needed: int) -> None:
    cache = paths.hub_cache_dir()
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed + HEADROOM > free:
        message = f"the download needs {size(needed)}, but {cache} has {size(free)} free"
        raise StorageFailed(message, hint="free some space, or set HF_HOME to a larger disk", needed=needed, free=free)


def _name_commit(ref: Path, commit: str) -> None:
    """Point a branch or tag at a commit, whole or not at all."""
    ref.parent.mkdir(parents=True, exist_ok=True)
    fresh = ref.with_name(f".{ref.name}.new")
    fresh.write_text(commit, "ascii")
    fresh.replace(ref)
