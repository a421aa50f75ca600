"""The paths of all files and folders that localllm uses."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import tempfile
from functools import cache
from pathlib import Path

import platformdirs

APP = "localllm"
RENAME = "rename the file or the folder"
_NO_TEXT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, and bytes that are no UTF-8 text


def printable(path: Path | str) -> str:
    """The path as text for people and JSON. Control characters and bytes that are no UTF-8 text become escapes."""
    return _NO_TEXT.sub(lambda match: f"\\x{ord(match[0]) & 0xFF:02x}", str(path))


def problem_of_name(path: Path | str) -> str:
    """The reason why localllm uses no model and no adapter at a path; empty if the path is text."""
    if not _NO_TEXT.search(str(path)):
        return ""
    return f"{printable(path)[-200:]} has control characters or bytes that are no UTF-8 text"


def config_file() -> Path:
    """The settings file, editable by the user."""
    return Path(os.environ.get("LOCALLLM_CONFIG") or platformdirs.user_config_path(APP) / "config.toml")


def models_file() -> Path:
    """The file of the user's aliases and settings of single models."""
    return config_file().with_name("models.toml")


def user_catalog_file() -> Path:
    """The file of the user's entries of the catalog."""
    return config_file().with_name("catalog.toml")


def catalog_file() -> Path:
    """The bundled catalog of short names."""
    return assets_dir() / "catalog.toml"


def data_dir() -> Path:
    """The folder of the chat history, the stored responses and the generated API key."""
    return platformdirs.user_data_path(APP)


def history_file() -> Path:
    return data_dir() / "history.sqlite3"


def responses_file() -> Path:
    """The responses that the daemon stores for its clients."""
    return data_dir() / "responses.sqlite3"


def api_key_file() -> Path:
    return data_dir() / "api-key"


def cache_dir() -> Path:
    """The cache folder of localllm: files that can be created again. Models are in the Hugging Face cache."""
    return platformdirs.user_cache_path(APP)


def hub_cache_dir() -> Path:
    """The Hugging Face cache, which other programs share. The variables of huggingface_hub can move it."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if cache:
        return Path(cache).expanduser()
    return _hugging_face_home() / "hub"


def hub_token_file() -> Path:
    """The file of the access token for Hugging Face. The variables of huggingface_hub can move it."""
    file = os.environ.get("HF_TOKEN_PATH")
    return Path(file).expanduser() if file else _hugging_face_home() / "token"


def _hugging_face_home() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HOME") or base).expanduser()


def hub_cache_without_links() -> str:
    """The absolute path of hub_cache_dir without symbolic links, so that two processes can compare it."""
    return os.path.realpath(hub_cache_dir())


def disk_free(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return shutil.disk_usage(existing).free


def packed_dir(model: Path) -> Path:
    """The folder of a model's cached quantised weights (not created here).

    This folder is inside the model folder and is deleted with the model. If the model folder is read-only or part of
    localllm, the folder of the weights is in localllm's cache.
    """
    if model.is_dir() and os.access(model, os.W_OK) and assets_dir() not in model.resolve().parents:
        return model / ".localllm"
    return cache_dir() / "packed" / hashlib.sha256(os.fsencode(model.resolve())).hexdigest()[:16]


def compiled_dir() -> Path:
    """The folder of models compiled by torch (not created here). torch's variable TORCHINDUCTOR_CACHE_DIR moves it."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(folder).expanduser() if folder else cache_dir() / "compiled"


def architectures_file() -> Path:
    """The file that remembers which architectures the backends support."""
    return cache_dir() / "architectures.json"


def self_test_dir() -> Path:
    """The folder of the results of the kernel self-test (not created here)."""
    return cache_dir() / "self-test"


def log_dir() -> Path:
    return platformdirs.user_log_path(APP)


def runtime_dir() -> Path:
    """The folder of the daemon's socket, pid and port files, created with mode 0700.

    Raises PermissionError if the folder belongs to another user, or another user may enter it.
    """
    folder = _runtime_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    is_own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    is_shared = stat.S_IMODE(status.st_mode) & 0o077
    if not is_own_folder or is_shared:
        raise PermissionError(
            f"{folder} must be a folder that belongs to you, with mode 0700; delete it or correct its mode"
        )
    return folder


def _runtime_folder() -> Path:
    folder = os.environ.get("LOCALLLM_RUNTIME_DIR")
    if folder:
        return Path(folder)
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK):
        return Path(base) / APP
    return Path(tempfile.gettempdir()) / f"{APP}-{os.getuid()}"


def socket_file() -> Path:
    return runtime_dir() / "daemon.sock"


def pid_file() -> Path:
    return runtime_dir() / "daemon.pid"


def port_file() -> Path:
    return runtime_dir() / "daemon.port"


@cache
def assets_dir() -> Path:
    return Path(__file__).resolve().parent.parent / "assets"


def guide_dir() -> Path:
    """The folder of the built-in model, guide."""
    return assets_dir() / "guide"


def builtin_adapters_dir() -> Path:
    """The folder of the built-in adapters of guide. Each has a subfolder."""
    return assets_dir() / "adapters"
