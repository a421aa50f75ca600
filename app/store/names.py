"""Names of models and adapters, as users type them. The parser reads no file and sends no request.

    guide  qwen3:0.6b  my-alias          short name: the built-in model, the catalog, an alias
    org/repo  org/repo@revision          repository of Hugging Face; `hf:` in front says the same
    ms:org/repo                          repository of ModelScope
    org/repo:Q4_K_M                      the GGUF file of this quantisation; upper and lower case are equal
    https://host/path/model.gguf         one file; an address of a hub becomes the name of its repository
    ./folder  /folder  ~/folder          folder or file on this machine

A name of a repository becomes part of paths. Therefore every part is plain ASCII without `..`, and is no name of a
Windows device.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from .. import paths
from ..errors import InvalidRequest

Hub = Literal["hf", "ms"]

GUIDE = "guide"  # the built-in model
MAIN = "main"
LOCAL = "local"  # the organisation of imported models and of files from other hosts; not a name of a hub
MAX_NAME = 4096  # characters

# As on Hugging Face: at most 96 characters, and no `--`, which separates organisation and name in the cache.
SEGMENT = r"[A-Za-z0-9_](?:[A-Za-z0-9._]|-(?!-)){0,95}"
REVISION = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}"
QUANT = r"(?:UD-)?(?:I?Q[1-8](?:_[0-9A-Z]{1,3}){0,3}|TQ[12]_0|BF16|F16|F32|MXFP4(?:_MOE)?|NVFP4)"
REPOSITORY = re.compile(
    rf"(?:(?P<hub>hf|ms):)?(?P<repo>{SEGMENT}/{SEGMENT})(?:@(?P<revision>{REVISION}))?(?::(?P<quant>(?i:{QUANT})))?"
)
SHORT = re.compile(rf"(?P<family>{SEGMENT})(?::(?P<tag>{SEGMENT}))?(?:@(?P<revision>{REVISION}))?")
DEVICE = re.compile(r"(?i:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?")
ADDRESS = re.compile(r"(?i:https?)://.*")
HUB_HOSTS: dict[str, Hub] = {
    "huggingface.co": "hf",
    "hf.co": "hf",
    "modelscope.cn": "ms",
    "www.modelscope.cn": "ms",
}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
WEIGHT_FILES = (".gguf", ".safetensors")
EXAMPLES = "for example qwen3:0.6b, Qwen/Qwen3-0.6B, Qwen/Qwen3-0.6B@main, or a folder with a leading ./"


@dataclass(frozen=True, slots=True)
class ShortName:
    """`family`, `family:tag` or `family@revision`: guide, an alias, an entry of the catalog or a cached repository."""

    family: str
    tag: str = ""
    revision: str = ""

    def __str__(self) -> str:
        return self.family + (f":{self.tag}" if self.tag else "") + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of a hub, and the selection of its files."""

    repo: str  # org/repo
    revision: str = ""  # branch, tag or commit; empty: the name has no revision
    quant: str = ""  # GGUF quantisation in upper case, such as Q4_K_M; empty: none selected
    hub: Hub = "hf"
    file: str = ""  # the only weight file to select; empty: none selected

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.id}{revision}" + (f":{self.quant}" if self.quant else "")

    @property
    def id(self) -> str:
        """The name of the repository with its hub, without the selection."""
        return self.repo if self.hub == "hf" else f"{self.hub}:{self.repo}"

    @property
    def folder(self) -> Path:
        """The folder of the repository in the shared cache. Repositories of ModelScope have folders of their own."""
        return repo_folder(self.repo if self.hub == "hf" else f"{self.hub}/{self.repo}")


@dataclass(frozen=True, slots=True)
class FileAddress:
    """One weight file on a host that is not a hub."""

    url: str
    file: str  # the last segment of the path, decoded

    def __str__(self) -> str:
        return self.url

    @property
    def repo(self) -> str:
        """The name of the file's repository in the cache: `local/`, the name of the file, and a hash of the address."""
        stem = re.sub(r"[^A-Za-z0-9._]+", "-", self.file.rpartition(".")[0]).strip(".-_")
        return f"{LOCAL}/{stem[:64] or 'model'}-{hashlib.sha256(self.url.encode()).hexdigest()[:8]}"

    @property
    def folder(self) -> Path:
        return repo_folder(self.repo)


@dataclass(frozen=True, slots=True)
class LocalPath:
    """A folder or a file on this machine, as the user wrote it."""

    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def path(self) -> Path:
        """The absolute path."""
        return Path(self.text).expanduser().absolute()


Name = ShortName | HubName | FileAddress | LocalPath


def parse(text: str) -> Name:
    """Parse the name of a model or an adapter. Raises InvalidRequest for a malformed or hostile name."""
    _refuse_characters(text)
    if is_path(text):
        return LocalPath(text)
    if ADDRESS.fullmatch(text):
        return _from_address(text)
    if match := REPOSITORY.fullmatch(text):
        return _hub_name(text, match)
    if (match := SHORT.fullmatch(text)) and not text.startswith(("hf:", "ms:")):
        _refuse_segments(text, match["family"], match["tag"] or "", match["revision"] or "")
        return ShortName(match["family"], match["tag"] or "", match["revision"] or "")
    raise _malformed(text)


def parse_hub(text: str) -> HubName:
    """Parse the name of a repository. Raises InvalidRequest for every other kind of name."""
    name = parse(text)
    if isinstance(name, HubName):
        return name
    hint = "for example Qwen/Qwen3-0.6B, or Qwen/Qwen3-0.6B@main for one branch, tag or commit"
    raise InvalidRequest(f"{text[:200]!r} is not the name of a repository (org/repo)", hint=hint, param="model")


def has_quant(text: str) -> bool:
    """True for the name of a repository that ends with a GGUF quantisation, such as org/repo:Q4_K_M."""
    match = REPOSITORY.fullmatch(text)
    return match is not None and bool(match["quant"])


def without_gguf(id: str) -> str:
    """The id of the snapshot that a model belongs to: org/repo@v2 for org/repo@v2:Q8_0. Other ids stay."""
    if not (REPOSITORY.fullmatch(id) or ADDRESS.fullmatch(id)):
        return id
    name = parse(id)
    if not isinstance(name, HubName):
        return id
    return str(replace(name, revision="" if name.revision == MAIN else name.revision, quant="", file=""))


def settings_names(id: str) -> list[str]:
    """The names of all settings that apply to a model, the most general name first.

    For org/repo@v2:Q8_0: org/repo, org/repo:Q8_0, org/repo@v2, org/repo@v2:Q8_0. `id`: that of a model on this machine.
    """
    if is_path(id):
        return [id]
    snapshot = without_gguf(id)
    repository = snapshot.partition("@")[0]
    quant = id.removeprefix(snapshot)  # with its colon
    if not quant.startswith(":"):
        return list(dict.fromkeys([repository, snapshot, id]))
    names = [repository, f"{repository}{quant}", snapshot, id]
    return list(dict.fromkeys(names))


def is_path(text: str) -> bool:
    return text in {".", "..", "~"} or text.startswith(("/", "./", "../", "~/"))


def check_path(path: Path | str) -> None:
    """Raises InvalidRequest for a path that is no text: it cannot be in a request, in a setting or in an answer."""
    if problem := paths.problem_of_name(path):
        raise InvalidRequest(problem, hint=paths.RENAME, param="model")


def adapter_name(text: str) -> str:
    """The name that requests have for an adapter if the user gives none: the last part of its id or of its path.

    The revision, the quantisation and the extension .gguf are left out.
    """
    if is_path(text):
        path = Path(text)
        return path.stem if path.suffix.lower() == WEIGHT_FILES[0] else path.name
    repository = re.sub(rf":{QUANT}$", "", text, flags=re.IGNORECASE)
    return repository.partition("@")[0].rpartition("/")[2]


def repo_folder(repo: str) -> Path:
    """The folder of a repository in the shared cache."""
    return paths.hub_cache_dir() / f"models--{repo.replace('/', '--')}"


def repo_of_folder(folder: Path) -> str:
    """The name of the repository in a folder of the shared cache: `org/repo`, `ms:org/repo` or `repo`."""
    repo = folder.name.partition("--")[2].replace("--", "/", 1)
    hub, _, rest = repo.partition("/")
    if hub == "ms" and "--" in rest:
        return f"ms:{rest.replace('--', '/', 1)}"
    return repo


def is_repository(text: str) -> bool:
    """True if `parse` accepts a text as the name of a repository, which the cache may have without an organisation."""
    try:
        return isinstance(parse(text), HubName | ShortName)
    except InvalidRequest:
        return False


def _hub_name(text: str, match: re.Match[str]) -> HubName:
    revision = match["revision"] or ""
    _refuse_segments(text, *match["repo"].split("/"), *revision.split("/"))
    if match["hub"] and match["repo"].startswith(f"{LOCAL}/"):
        raise _malformed(text)
    hub: Hub = "ms" if match["hub"] == "ms" else "hf"
    return HubName(match["repo"], revision, (match["quant"] or "").upper(), hub)


def _from_address(text: str) -> HubName | FileAddress:
    """The name for an address. Raises InvalidRequest for an address without https, or of another kind of file."""
    try:
        parts = urlsplit(text)
        host = parts.hostname or ""
        extras = (parts.username, parts.password, parts.fragment, "\\" in text, parts.port == 0)
        segments = [unquote(segment, errors="strict") for segment in parts.path.split("/")[1:]]
    except ValueError:
        raise _malformed(text) from None
    if parts.scheme != "https" and host not in LOOPBACK:
        raise InvalidRequest(f"{text[:200]!r} is not encrypted", hint="use an address with https://", param="model")
    _refuse_segments(text, *segments)
    if any(extras) or not host:
        raise _malformed(text)
    return _from_hub_page(text, HUB_HOSTS[host], segments) if host in HUB_HOSTS else _file_address(text, segments)


def _file_address(text: str, segments: list[str]) -> FileAddress:
    """`segments`: those of the path, decoded."""
    if not "".join(segments[-1:]).lower().endswith(WEIGHT_FILES):
        hint = "an address ends in .gguf or .safetensors; a repository has a name such as Qwen/Qwen3-0.6B"
        raise InvalidRequest(f"{text[:200]!r} is not the address of a weight file", hint=hint, param="model")
    return FileAddress(text, segments[-1])


def _from_hub_page(text: str, hub: Hub, segments: list[str]) -> HubName:
    """The repository of a page: /org/repo, /org/repo/tree/REVISION or /org/repo/resolve/REVISION/file."""
    segments = [segment for segment in segments if segment]
    if hub == "ms" and segments[:1] == ["models"]:
        segments = segments[1:]
    match segments:
        case [org, repo] | [org, repo, "summary" | "files"]:
            return _checked(text, HubName(f"{org}/{repo}", hub=hub))
        case [org, repo, "tree", revision]:
            return _checked(text, HubName(f"{org}/{repo}", revision, hub=hub))
        case [org, repo, "resolve" | "blob", revision, *folders, file] if file.lower().endswith(WEIGHT_FILES):
            return _checked(text, HubName(f"{org}/{repo}", revision, hub=hub, file="/".join([*folders, file])))
    raise _malformed(text)


def _checked(text: str, name: HubName) -> HubName:
    """The name, if its text is also a name. Raises InvalidRequest."""
    if not REPOSITORY.fullmatch(str(name)):
        raise _malformed(text)
    return name


def _refuse_characters(text: str) -> None:
    """Raises InvalidRequest for an empty or long name, control characters, and characters outside of ASCII in a name.

    A path may have any printable characters.
    """
    if not text or len(text) > MAX_NAME:
        raise _malformed(text)
    if is_path(text):
        check_path(text)
    if any(not (character.isprintable()) for character in text):
        raise _malformed(text)
    if is_path(text) or text.isascii():
        return
    character = next(character for character in text if not character.isascii())
    raise InvalidRequest(
        f"{text[:200]!a} has the character U+{ord(character):04X}; a name has ASCII characters only",
        hint=EXAMPLES,
        param="model",
    )


def _refuse_segments(text: str, *segments: str) -> None:
    """Raises InvalidRequest for a segment that is `..` or similar, a device of Windows, or hides a separator."""
    for segment in segments:
        if ".." in segment or segment == "." or DEVICE.fullmatch(segment) or re.search(r"[\\/\x00-\x1f]", segment):
            raise _malformed(text)


def _malformed(text: str) -> InvalidRequest:
    return InvalidRequest(f"{text[:200]!a} is not the name of a model", hint=EXAMPLES, param="model")
