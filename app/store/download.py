"""`localllm pull`: downloads the files of a model from Hugging Face into the shared cache.

The files are downloaded one at a time, weights last. When all files are complete, the branch is set to the new commit.
Until then `localllm list` and `localllm chat` use the old commit.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.modelfiles import INDEX, SINGLE
from .. import paths
from ..errors import ModelUnusable, StorageFailed
from ..sizes import size
from . import cache, hub
from .names import parse_hub
from .remote import RemoteFile

if TYPE_CHECKING:
    from huggingface_hub.utils import tqdm

# Files to download with the weights: those that a load reads, and the licence. A `*` matches within one folder.
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
ADAPTER = (cache.ADAPTER_CONFIG, "adapter_model.safetensors", "adapters.safetensors", "*.md", "LICENSE*", "NOTICE*")
WEIGHTS = "*.safetensors"
UNSAFE = (".bin", ".pt", ".pth", ".ckpt")  # pickle files: loading such a file runs the code in it
OTHER_REPO = "find a repo of the same model with .safetensors files"
HEADROOM = 64 * 2**20  # bytes to leave free on the disk


def pull(name: str, notify: Callable[[str], None]) -> cache.ModelRef:
    """Download the missing files of `org/repo[@revision]` and return the model or the adapter.

    Progress bars go to standard error.

    Raises InvalidRequest, ModelNotFound, ModelUnusable (no safetensors weights), DownloadFailed or StorageFailed.
    """
    target = parse_hub(name)
    from huggingface_hub import HfApi, hf_hub_download

    revision = target.revision or cache.MAIN
    with hub.translate_errors(target):
        info = HfApi().model_info(target.repo, revision=revision, files_metadata=True)
        assert info.sha is not None, "the hub always names the commit"
        files = choose(target.repo, [RemoteFile(file.rfilename, file.size or 0) for file in info.siblings or []])
        snapshot = target.folder / "snapshots" / info.sha
        missing = [file for file in files if not (snapshot / file.name).exists()]
        _check_space(sum(file.size for file in missing))
        if missing:
            notify(f"downloading {len(missing)} of {len(files)} files of {target.repo}, commit {info.sha[:12]}")
        for number, file in enumerate(missing, start=1):
            bar = _progress_bar(f"{number}/{len(missing)} {file.name}")
            folder = paths.hub_cache_dir()
            hf_hub_download(target.repo, file.name, revision=info.sha, cache_dir=folder, tqdm_class=bar)
        if not cache.is_commit(revision, info.sha):
            _name_commit(target.folder / "refs" / revision, info.sha)
    resolve = cache.resolve_adapter if _is_adapter(files) else cache.resolve
    return resolve(f"{target.repo}@{info.sha}")


def _progress_bar(title: str) -> type[tqdm]:
    """The progress bar of huggingface_hub, labelled with `title` instead of the end of a path."""
    from huggingface_hub.utils import tqdm

    class Titled(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "desc": title})  # type: ignore[no-untyped-call]

    return Titled


def choose(repo: str, files: list[RemoteFile]) -> list[RemoteFile]:
    """The files to download, weights last. Raises ModelUnusable if there are no safetensors weights."""
    files = sorted(files, key=attrgetter("name"))
    names = {file.name for file in files}
    weights = _matching(files, WEIGHTS)
    if not weights:
        raise ModelUnusable(f"{repo} {_problem(names)}", hint=OTHER_REPO)
    if _is_adapter(files):
        return _matching(files, *ADAPTER)
    if "config.json" not in names:
        raise ModelUnusable(f"{repo} has no config.json: it is not a complete model", hint="pull its base model")
    if not names & {SINGLE, INDEX}:
        problem = f"{repo} has weights in {weights[0].name}, but no {SINGLE} or {INDEX}"
        raise ModelUnusable(problem, hint=OTHER_REPO)
    # Some repos also have a copy of the weights under another name; config.json describes `model*.safetensors`.
    weights = [file for file in weights if file.name.startswith("model")] or weights
    return _matching(files, *SMALL) + weights


def _is_adapter(files: list[RemoteFile]) -> bool:
    """True if the repo has the files of an adapter, but no model."""
    names = {file.name for file in files}
    return cache.ADAPTER_CONFIG in names and not names & {"config.json", SINGLE, INDEX}


def _matching(files: list[RemoteFile], *patterns: str) -> list[RemoteFile]:
    """The files that match one of the patterns. A pattern matches only names with the same number of folders."""
    matches = []
    for file in files:
        depth = file.name.count("/")
        if any(fnmatch(file.name, pattern) and pattern.count("/") == depth for pattern in patterns):
            matches.append(file)
    return matches


def _problem(names: set[str]) -> str:
    """The reason why a repo without safetensors weights is unusable."""
    for name in sorted(names):
        if name.endswith(UNSAFE):
            return f"has only pickle weights ({name}); loading them would run code from the repo"
    for name in names:
        if name.endswith(".gguf"):
            return "has only GGUF weights, which this version does not support"
    return "has no safetensors weights"


def _check_space(needed: int) -> None:
    folder = paths.hub_cache_dir()
    free = paths.disk_free(folder)
    if needed + HEADROOM > free:
        message = f"not enough disk space: the download needs {size(needed)}, {folder} has {size(free)} free"
        raise StorageFailed(message, hint="free some space, or set HF_HOME to a larger disk", needed=needed, free=free)


def _name_commit(ref: Path, commit: str) -> None:
    """Make the file `ref` of a branch or tag name a commit. The change is atomic."""
    ref.parent.mkdir(parents=True, exist_ok=True)
    temporary = ref.with_name(f".{ref.name}.new")
    temporary.write_text(commit, "ascii")
    temporary.replace(ref)
