"""`localllm pull`: downloads the files of a model from Hugging Face into the shared cache.

The files are downloaded one at a time, weights last. When all files are complete, the branch is set to the new commit.
Until then `localllm list` and `localllm chat` use the old commit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import paths
from ..errors import InvalidRequest, StorageFailed
from ..sizes import size
from . import cache, catalog, hub
from .names import MAIN, HubName
from .remote import RemoteFile
from .selection import gguf_refusal, select, selects_gguf

if TYPE_CHECKING:
    from huggingface_hub.utils import tqdm

HEADROOM = 64 * 2**20  # bytes to leave free on the disk


def pull(name: str, notify: Callable[[str], None]) -> cache.ModelRef:
    """Download the missing files of `org/repo[@revision]` and return the model or the adapter.

    Progress bars go to standard error.

    Raises InvalidRequest, ModelNotFound, ModelUnusable (no safetensors weights), DownloadFailed or StorageFailed.
    """
    target = catalog.remote_name(name)
    if not isinstance(target, HubName):
        raise InvalidRequest(f"{name[:200]} is not on a hub", hint="download the file, then localllm import FILE")
    if selects_gguf(target):
        raise gguf_refusal(target)
    from huggingface_hub import HfApi, hf_hub_download

    revision = target.revision or MAIN
    with hub.translate_errors(target):
        info = HfApi().model_info(target.repo, revision=revision, files_metadata=True)
        assert info.sha is not None, "the hub always names the commit"
        selection = select(target, [RemoteFile(file.rfilename, file.size or 0) for file in info.siblings or []])
        files = selection.files
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
    resolve = cache.resolve_adapter if selection.kind == "adapter" else cache.resolve
    return resolve(f"{target.repo}@{info.sha}")


def _progress_bar(title: str) -> type[tqdm]:
    """The progress bar of huggingface_hub, labelled with `title` instead of the end of a path."""
    from huggingface_hub.utils import tqdm

    class Titled(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "desc": title})  # type: ignore[no-untyped-call]

    return Titled


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
