"""Every path localllm uses. Nothing else in the project builds one outside a folder it was given."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

import platformdirs

APP = "localllm"


def config_file() -> Path:
    """Settings a person may edit."""
    return Path(os.environ.get("LOCALLLM_CONFIG") or platformdirs.user_config_path(APP) / "config.toml")


def data_dir() -> Path:
    """Chat history and the generated API key."""
    return platformdirs.user_data_path(APP)


def history_file() -> Path:
    return data_dir() / "history.sqlite3"


def api_key_file() -> Path:
    return data_dir() / "api-key"


def cache_dir() -> Path:
    """What can be deleted without loss. Weights live in the shared Hugging Face cache, not here."""
    return platformdirs.user_cache_path(APP)


def hub_cache_dir() -> Path:
    """The Hugging Face cache that every program shares, placed by the same variables as there."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HOME") or base).expanduser() / "hub"


def packed_dir(model: Path) -> Path:
    """Weights of this model's folder as they were made smaller on load; not made here. Beside the model, so that they
    go with it; in our cache where that folder is not ours to write in, or is our own program's."""
    if os.access(model, os.W_OK) and assets_dir() not in model.resolve().parents:
        return model / ".localllm"
    return cache_dir() / "packed" / hashlib.sha256(os.fsencode(model.resolve())).hexdigest()[:16]


def compiled_dir() -> Path:
    """What torch's compiler made of models, for the next start; not made here. Placed by the same variable as there."""
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else cache_dir() / "compiled"


def self_test_dir() -> Path:
    """What the kernels' self-test found on this machine's devices; not made here."""
    return cache_dir() / "self-test"


def log_dir() -> Path:
    return platformdirs.user_log_path(APP)


def runtime_dir() -> Path:
    """Socket, pid and port files: private to this user, made here with mode 0700.

    Raises PermissionError when the folder belongs to somebody else or others may enter it.
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
        raise PermissionError(f"{folder} must be a folder of your own with mode 0700; remove it or fix its mode")
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
    """The bundled model."""
    return assets_dir() / "guide"
