"""The special tokens and the added tokens that the side files of a tokenizer declare, by the rules of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers import AddedToken

from ....engine.errors import ModelRefused
from .files import SideFiles

Value = str | AddedToken

_STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
_EXTRA = "extra_special_tokens"
_ADDITIONAL = "additional_special_tokens"  # the older name of _EXTRA
_CONFIG = "tokenizer_config.json"
_MAP = "special_tokens_map.json"
_MAX_DIGITS = 10  # number of digits of a token id


class _Token(msgspec.Struct, frozen=True):
    content: str
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False
    special: bool = False


@dataclass(frozen=True, slots=True)
class Names:
    """The special tokens that the files declare. A str has no flags."""

    special: Mapping[str, Value]  # by name: bos_token, eos_token, …, and names of the model's own
    extra: list[Value]  # special tokens without a name
    table: Mapping[int, AddedToken]  # added tokens by the id that the files give them

    @property
    def texts(self) -> dict[str, str]:
        """The texts of the named special tokens."""
        return {name: str(value) for name, value in self.special.items()}

    @property
    def all_texts(self) -> list[str]:
        """The texts of all special tokens, each once."""
        return list(dict.fromkeys(map(str, [*self.special.values(), *self.extra])))


def read_names(
    files: SideFiles,
    stored: Mapping[int, AddedToken],
    defaults: Mapping[str, str | None],
    *,
    infills: bool = False,
) -> Names:
    """Raises ModelRefused for a malformed token.

    `stored`: the added tokens of tokenizer.json. `defaults`: special tokens of the class, by name. `infills`: whether
    those of them with names of the model's own are also extra tokens.
    """
    values, own_names = _declared(files)
    if files.lists_tokens:
        older, newer = _listed(values["added_tokens_decoder"]), {}
    else:
        _merge_map(values, files.special_map)
        own_names |= _pop_names(values)
        older, newer = _older(values, files.added), dict(stored)
    extra = values.get(_EXTRA, values.get(_ADDITIONAL))
    _check_extra(extra)
    if isinstance(extra, dict):
        own_names, extra = extra | own_names, None
    ours = _own(defaults)
    more = _tokens(ours | {name: value for name, value in _own(values).items() if _is_token(value)})
    if infills and _EXTRA not in values:
        extra = [*(extra or ()), *map(more.__getitem__, ours)]
    by_text = {token.content: token for token in [*older.values(), *newer.values()]}
    standard = _standard(values, by_text, defaults)
    special = dict.fromkeys(_STANDARD) | standard | more | _tokens(own_names)  # new tokens get their ids in this order
    return Names({name: value for name, value in special.items() if value is not None}, _list(extra), older | newer)


def _declared(files: SideFiles) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the values of tokenizer_config.json without special tokens that have other names, and those special tokens)."""
    values = dict(files.config)
    for source in (values, files.special_map):
        _check_extra(source.get(_EXTRA))
        _check_extra(source.get(_ADDITIONAL))
    if not values.get(_EXTRA) and _ADDITIONAL in values:
        values[_EXTRA] = values.pop(_ADDITIONAL)
    own_names = {name: values.pop(name) for name, value in _own(values).items() if isinstance(value, str)}
    return values, own_names | _pop_names(values)


def read_token(value: Mapping[str, Any], source: str, **flags: bool) -> AddedToken:
    """The token of a JSON object. `flags` have priority. Raises ModelRefused."""
    try:
        msgspec.convert(value, type=_Token)
    except msgspec.ValidationError as error:
        raise ModelRefused(f"{source}: {error}") from None
    return AddedToken(value["content"], **({name: value[name] for name in _FLAGS if name in value} | flags))


def _is_own(name: str) -> bool:
    """Whether this is the name of a special token that only some models have, such as image_token."""
    return name.endswith("_token") and name not in _STANDARD


def _own(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if _is_own(name)}


def _is_token(value: object) -> bool:
    return isinstance(value, str | AddedToken) or (isinstance(value, dict) and "content" in value)


def _pop_names(values: dict[str, Any]) -> dict[str, Any]:
    """Remove extra tokens that have names, and return them."""
    return values.pop(_EXTRA) if isinstance(values.get(_EXTRA), dict) else {}


def _standard(
    values: Mapping[str, Any], by_text: Mapping[str, AddedToken], defaults: Mapping[str, str | None]
) -> dict[str, Value]:
    """The special tokens with standard names; those of the files have the flags of the added token of this text."""
    special: dict[str, Value] = {}
    for name in _STANDARD:
        if name in values and values[name] is not None:
            value = _value(values[name], name)
            special[name] = by_text.get(str(value), value)
        elif name not in values and (text := defaults.get(name)) is not None:
            special[name] = text
    return special


def _listed(entries: object) -> dict[int, AddedToken]:
    """The tokens of added_tokens_decoder."""
    source = f"{_CONFIG}: added_tokens_decoder"
    if not isinstance(entries, dict):
        raise ModelRefused(f"{source} must be an object")
    table = {}
    for index, value in entries.items():
        if not index.isdecimal() or len(index) > _MAX_DIGITS or not isinstance(value, dict):
            raise ModelRefused(f"{source}: {index!r} must be the id of an object with `content`")
        table[int(index)] = read_token(value, f"{source}: {index}")
    return table


def _merge_map(values: dict[str, Any], special_map: Mapping[str, Any]) -> None:
    """Add the values of special_tokens_map.json, which have priority."""
    for name, value in special_map.items():
        if name == _EXTRA and isinstance(value, list):
            before = list(values.get(_EXTRA) or ())
            values[name] = before + [entry for entry in value if entry not in before]
        elif name != _EXTRA and isinstance(value, dict):
            values[name] = read_token(value, f"{_MAP}: {name}", special=True)
        else:
            values[name] = value


def _older(values: Mapping[str, Any], added: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The tokens of added_tokens.json, which has the id of each text. Those that are special have no other flag."""
    declared = [*(values.get(name) for name in _STANDARD), *(values.get(_EXTRA) or ())]
    special = {str(value) for value in declared if isinstance(value, str | AddedToken)}
    table = {}
    for text, index in added.items():
        if type(index) is not int:
            raise ModelRefused(f"added_tokens.json: the id of {text!r} must be an integer")
        table[index] = AddedToken(text, normalized=text not in special, special=text in special)
    return table


def _value(value: object, name: str) -> Value:
    if isinstance(value, str | AddedToken):
        return value
    if isinstance(value, dict):  # without __type, transformers refuses it; the token is special by its name
        return read_token(value, name, **({} if "__type" in value else {"special": True}))
    raise ModelRefused(f"{_CONFIG}: {name} must be a string or an object with `content`")


def _tokens(values: Mapping[str, object]) -> dict[str, Value]:
    return {name: _value(value, name) for name, value in values.items()}


def _list(values: list[object] | None) -> list[Value]:
    return [_value(value, _EXTRA) for value in values or ()]


def _check_extra(values: object) -> None:
    if values is not None and not isinstance(values, list | dict):
        raise ModelRefused(f"{_CONFIG}: {_EXTRA} must be a list of tokens, or an object of tokens by their names")
