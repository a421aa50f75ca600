"""Whether a backend supports the architecture of a model. A process asks the backends once for each config.json, and
once for each GGUF file.

The answers are in a file of the cache folder, because a list of models must not start a process for each of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from ....engine.files.config_files import CONFIG_FILES
from ....engine.files.families import FAMILIES
from ....engine.files.model_files import read_architecture
from ... import paths
from ...purpose import Purpose
from ...version import VERSION
from ..local.ggufs import is_gguf

ACCEPTS = (sys.executable, "-P", "-m", "localllm.app.worker.accepts_child")
START_SECONDS = 60.0  # maximum duration of that process for one model
SECONDS_PER_MODEL = 5.0  # more for each further model

MISSING = " missing"  # end of the key of a missing package
INSTALL = " install"  # end of the key of the command that installs it
FACTS = " facts"  # end of the key of the facts about a GGUF model

FORMAT = 2  # format of the stored answers; answers in another format are not used

_asking = threading.Lock()


def unsupported(folder: Path) -> str:
    """The reason why no backend supports the architecture and the weight format of a model; empty if one does.

    `folder`: a folder with config.json, or a GGUF file. Starts a process if the answer is not remembered. Raises
    ModelRefused for a malformed config.json.
    """
    key = question(folder)
    if answer(key) is None:
        return ask([folder])[folder].refusal
    return _read().get(key, "")


class Facts(msgspec.Struct, frozen=True):
    """The facts in the header of a sound GGUF model."""

    architecture: str
    context: int  # tokens; 0: unknown
    purpose: Purpose


def remembered_facts(version: Sequence[object]) -> Facts | None:
    """The facts about a GGUF model; None if no process has read these versions of its files.

    `version`: the paths, sizes and times of the files.
    """
    try:
        return msgspec.json.decode(remembered(key_of(version, FACTS)) or "", type=Facts)
    except msgspec.DecodeError:
        return None


def remember_facts(version: Sequence[object], facts: Facts) -> None:
    """Remember the facts for `remembered_facts`: the header of a large vocabulary takes a tenth of a second."""
    remember({key_of(version, FACTS): msgspec.json.encode(facts).decode()})


def key_of(version: Sequence[object], kind: str) -> str:
    """The key of the stored facts about versions of files: paths, sizes and times. `kind`: the end of the key."""
    return hashlib.sha256(os.fsencode(f"{VERSION} {version}")).hexdigest()[:32] + kind


def remembered(key: str) -> str | None:
    """The text that `remember` got for a key; None without one."""
    return _read().get(key)


def question(folder: Path) -> str:
    """The key of the answer about a config.json or a GGUF file; empty if the architecture is certainly supported.

    Raises ModelRefused for a malformed config.json.
    """
    if is_gguf(folder):
        return _key(folder)
    config = read_architecture(folder).config
    is_foreign = config.quantization is not None and config.quantization.method == "foreign"
    return "" if config.model_type in FAMILIES and not is_foreign else _key(folder)


def answer(question: str) -> str | None:
    """The remembered reason why no backend on this machine runs a model; empty if one does, None without an answer."""
    if not question:
        return ""
    refusal = _read().get(question)
    return refusal if refusal is None else refusal or _read().get(question + MISSING, "")


def install_command(question: str) -> str:
    """The remembered command that installs the package that a model needs; empty if there is none."""
    return _read().get(question + INSTALL, "") if question else ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of the backends about one model."""

    refusal: str = ""  # why no backend supports the model
    missing: str = ""  # the package that the backend of the model needs and that is not installed
    install: str = ""  # the command that installs it

    @property
    def problem(self) -> str:
        return self.refusal or self.missing


def ask(folders: Sequence[Path]) -> dict[Path, Answer]:
    """The answer for each folder or GGUF file, by one process that asks the backends. Remembers the answers.

    The reason of a process that fails is not remembered.
    """
    command = (*ACCEPTS, *map(str, folders))
    seconds = START_SECONDS + SECONDS_PER_MODEL * len(folders)
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        problem = f"the backends gave no answer about the architecture within {seconds:g} s"
        return dict.fromkeys(folders, Answer(problem))
    if child.returncode:
        problem = f"the backends cannot be asked about the architecture: the process ended with {child.returncode}"
        return dict.fromkeys(folders, Answer(problem))
    answers = {folder: Answer(*texts) for folder, texts in zip(folders, json.loads(child.stdout), strict=True)}
    refusals = {_key(folder): answer.refusal for folder, answer in answers.items()}
    missing = {_key(folder) + MISSING: answer.missing for folder, answer in answers.items()}
    install = {_key(folder) + INSTALL: answer.install for folder, answer in answers.items()}
    remember(refusals | missing | install)
    return answers


def ask_in_background(folders: Sequence[Path]) -> None:
    """Ask the backends in a thread, and remember the answers. Does nothing while another thread asks."""
    if folders and _asking.acquire(blocking=False):
        threading.Thread(target=_ask_and_release, args=(folders,), name="architectures", daemon=True).start()


def _ask_and_release(folders: Sequence[Path]) -> None:
    try:
        ask(folders)
    finally:
        _asking.release()


def _key(folder: Path) -> str:
    """The hash of the configuration, and of the versions that decide about it. A GGUF file has its time instead."""
    if is_gguf(folder):
        status = folder.stat()
        content = os.fsencode(f"{_versions()}{os.path.realpath(folder)} {status.st_size} {status.st_mtime_ns}")
    else:
        files = [folder / name for name in CONFIG_FILES]
        content = _versions().encode() + b"".join(file.read_bytes() for file in files if file.exists())
    return hashlib.sha256(content).hexdigest()[:32]


def _versions() -> str:
    """A text that changes with the version of localllm and with each installation of a package. Some backends use the
    architectures of a package."""
    try:
        installed = Path(sysconfig.get_path("purelib")).stat().st_mtime_ns
    except OSError:
        installed = 0
    return f"{VERSION} {FORMAT} {installed} "


def _read() -> Mapping[str, str]:
    file = paths.architectures_file()
    try:
        status = file.stat()
    except OSError:
        return {}
    return _read_version(file, status.st_mtime_ns, status.st_size, status.st_ino)


@lru_cache(maxsize=4)
def _read_version(file: Path, *version: int) -> Mapping[str, str]:
    """The answers in one version of the file; empty for a damaged file."""
    try:
        values = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(values, dict):
        return {}
    return {key: reason for key, reason in values.items() if isinstance(reason, str)}


def remember(reasons: Mapping[str, str]) -> None:
    """Add answers to the file. A file that cannot be written only costs another process."""
    file = paths.architectures_file()
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({**_read(), **reasons}), "utf-8")
        temporary.replace(file)
