"""Every path that localllm uses."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

import platformdirs

APP = "localllm"


def config_file() -> Path:
    """The settings file, editable by the user."""
    return Path(os.environ.get("LOCALLLM_CONFIG") or platformdirs.user_config_path(APP) / "config.toml")


def data_dir() -> Path:
    """The folder of the chat history and the generated API key."""
    return platformdirs.user_data_path(APP)


def history_file() -> Path:
    return data_dir() / "history.sqlite3"


def api_key_file() -> Path:
    return data_dir() / "api-key"


def cache_dir() -> Path:
    """The folder of files that can be deleted without loss. Models are in the Hugging Face cache, not here."""
    return platformdirs.user_cache_path(APP)


def hub_cache_dir() -> Path:
    """The Hugging Face cache, shared with other programs. Uses the variables of huggingface_hub."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HOME") or base).expanduser() / "hub"


def packed_dir(model: Path) -> Path:
    """The folder of this model's cached quantised weights (not created here).

    It is inside the model folder, so that it is deleted with the model. If that folder is read-only or part of
    localllm, it is in our cache.
    """
    if os.access(model, os.W_OK) and assets_dir() not in model.resolve().parents:
        return model / ".localllm"
    return cache_dir() / "packed" / hashlib.sha256(os.fsencode(model.resolve())).hexdigest()[:16]


def compiled_dir() -> Path:
    """The folder of models compiled by torch (not created here). Uses torch's variable."""
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else cache_dir() / "compiled"


def self_test_dir() -> Path:
    """The folder of the kernel self-test's results (not created here)."""
    return cache_dir() / "self-test"


def log_dir() -> Path:
    return platformdirs.user_log_path(APP)


def runtime_dir() -> Path:
    """The folder of the socket, pid and port files, created with mode 0700.

    Raises PermissionError if the folder belongs to another user, or another user may enter it.
    """
    base = os.environ.get("LOCALLLM_RUNTIME_DIR") or os.environ.get("XDG_RUNTIME_DIR")
    if os.environ.get("LOCALLLM_RUNTIME_DIR"):
        folder = Path(str(base))
    elif base and os.access(base, os.W_OK):
        folder = Path(base) / APP
    else:
        folder = Path(tempfile.gettempdir()) / f"{APP}-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(f"{folder} must be your folder, with mode 0700; delete it or fix its mode")
    return folder


def socket_file() -> Path:
    return runtime_dir() / "daemon.sock"


def pid_file() -> Path:
    return runtime_dir() / "daemon.pid"


def port_file() -> Path:
    return runtime_dir() / "daemon.port"


def assets_dir() -> Path:
    return Path(__file__).resolve().parent.parent / "assets"


def guide_dir() -> Path:
    """The folder of the bundled model."""
    return assets_dir() / "guide"
