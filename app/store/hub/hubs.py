"""The hubs: their addresses, the access tokens of the user, and offline mode.

The variables are those of huggingface_hub. It sends no request for localllm, because it tells the hub which packages
and agents it finds on this machine.
"""

from __future__ import annotations

import os
from pathlib import Path

from ... import paths
from ...errors import DownloadFailed, StorageFailed
from ..transfer.http import Credentials, origin

HUGGING_FACE = "https://huggingface.co"
MODELSCOPE = "https://modelscope.cn"
TRUE = frozenset({"1", "ON", "YES", "TRUE"})  # values of HF_HUB_OFFLINE and HF_HUB_DISABLE_IMPLICIT_TOKEN
RETRY_HINT = "check the network and the proxy settings; then run the command again to continue"
GATED_HINT = "request access on its page, then set HF_TOKEN to a token of your account"


def endpoints() -> list[str]:
    """The addresses of Hugging Face and its mirrors, in order. HF_ENDPOINT may be a list with commas."""
    addresses = [address.strip().rstrip("/") for address in os.environ.get("HF_ENDPOINT", "").split(",")]
    return [address for address in addresses if address] or [HUGGING_FACE]


def modelscope_endpoint() -> str:
    return os.environ.get("MODELSCOPE_ENDPOINT", "").rstrip("/") or MODELSCOPE


def credentials() -> Credentials:
    """The access tokens of the user. Each belongs to one server: mirrors and targets of redirects get none.

    Raises StorageFailed if the file of a token is unreadable.
    """
    headers = {}
    if token := _hugging_face_token():
        headers[origin(endpoints()[0])] = {"Authorization": f"Bearer {token}"}
    if token := _clean(os.environ.get("MODELSCOPE_API_TOKEN", "")):
        headers[origin(modelscope_endpoint())] = {"Authorization": f"Bearer {token}"}
    return Credentials(headers)


def is_offline() -> bool:
    return _is_true("HF_HUB_OFFLINE")


def offline_error(name: str) -> DownloadFailed:
    return DownloadFailed(f"{name} is not on this machine, and offline mode is on", hint="unset HF_HUB_OFFLINE")


def _hugging_face_token() -> str:
    """The token of the environment, or that of `hf auth login`; empty without one."""
    if _is_true("HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        return ""
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    return _clean(token or _read(paths.hub_token_file()))


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        hint = "check HF_HOME and HF_TOKEN_PATH, or set HF_TOKEN"
        raise StorageFailed(f"cannot read the access token: {error}", hint=hint) from error


def _clean(token: str) -> str:
    """The token without ends of lines. Raises StorageFailed for a text that no header can have."""
    token = "".join(token.splitlines()).strip()
    if not (token.isascii() and token.isprintable()):
        raise StorageFailed("the access token is malformed: it has other characters than ASCII", hint="set HF_TOKEN")
    return token


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "").upper() in TRUE
