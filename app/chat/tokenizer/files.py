"""Reads the tokenizer files of a model folder. Clients see the errors, so they name the file without its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from ....engine.errors import ModelRefused
from ....engine.files import json_text

MAX_JSON = 128 * 2**20  # bytes; the largest tokenizer.json in use is about 35 MB


class _NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str


def read_text(path: Path) -> str:
    """The text of the file. Raises ModelRefused if the file is missing, too large or not UTF-8 text."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON:
            raise ModelRefused(f"{path.name} has {size} bytes; the limit is {MAX_JSON}")
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise ModelRefused(
            f"{path.name} is missing",
            hint="this version supports only tokenizers in the Hugging Face format (tokenizer.json)",
        ) from None
    except UnicodeDecodeError:
        raise ModelRefused(f"{path.name} is not UTF-8 text") from None
    except OSError as error:
        raise ModelRefused(f"{path.name} cannot be read: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty if there is no such file. Raises ModelRefused."""
    if not path.exists():
        return {}
    text = read_text(path)
    try:
        value = json_text.parse(text.encode())
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ModelRefused(f"{path.name} has half of a surrogate pair, which is no text") from None
    except ValueError as error:
        raise ModelRefused(f"{path.name} is {error}") from None
    if not isinstance(value, dict):
        raise ModelRefused(f"{path.name}: must contain a JSON object, not {type(value).__name__}")
    return value


class SideFiles:
    """The files beside tokenizer.json; each is empty if the folder lacks it."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelRefused for a broken file."""
        self.config = read_json(folder / "tokenizer_config.json")
        self.model = read_json(folder / "config.json")
        # transformers reads the other files only if tokenizer_config.json does not list the added tokens.
        self.lists_tokens = "added_tokens_decoder" in self.config
        self.special_map = {} if self.lists_tokens else read_json(folder / "special_tokens_map.json")
        self.added = {} if self.lists_tokens else read_json(folder / "added_tokens.json")
        names = self.config.get("fast_tokenizer_files")
        if names not in (None, [], ["tokenizer.json"]):
            raise ModelRefused(
                f"tokenizer_config.json: fast_tokenizer_files names {names}; localllm reads tokenizer.json only"
            )


def chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name: "default", and "tool_use" for some models. Raises ModelRefused.

    `config`: tokenizer_config.json. A template in a file of its own has priority.
    """
    source, value = _template(folder, config)
    try:
        template = msgspec.convert(value, type=str | list[_NamedTemplate] | None)
    except msgspec.ValidationError:
        raise ModelRefused(f"{source}: chat_template must be a string or a list of named strings") from None
    if isinstance(template, list):
        templates = {entry.name: entry.template for entry in template}
    else:
        templates = {"default": template} if template is not None else {}
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return templates | {path.stem: read_text(path) for path in more}


def _template(folder: Path, config: dict[str, Any]) -> tuple[str, object]:
    """The name of the file with the chat template, and the value of `chat_template`."""
    plain = folder / "chat_template.jinja"
    wrapped = folder / "chat_template.json"
    if plain.exists():
        return plain.name, read_text(plain)
    if wrapped.exists():
        return wrapped.name, read_json(wrapped).get("chat_template")
    return "tokenizer_config.json", config.get("chat_template")
