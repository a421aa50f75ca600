"""The files that the links of a snapshot name.

    snapshots/<commit>/name  →  ../../blobs/<hash>  →  ../../blobs/ab/<other hash>

The second link is huggingface_hub's: it stores equal files of several repositories once, in the folder `blobs` of the
cache, under another hash.
"""

from __future__ import annotations

import os
from pathlib import Path


def blob_of(link: Path) -> Path | None:
    """The file, or the link of huggingface_hub, that the link of a snapshot names; None if the path is no link."""
    try:
        target = link.readlink()
    except OSError:
        return None
    folder = os.path.realpath(link.parent)
    return Path(os.path.normpath(os.path.join(folder, target)))  # noqa: PTH118 - pathlib does not remove `..`


def has_shared(folder: Path) -> bool:
    """True if files of a repository folder are in the folder that repositories share."""
    return any(blob.is_symlink() for blob in (folder / "blobs").glob("*"))
