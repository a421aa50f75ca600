"""The interface of tokenizers: of Hugging Face models (huggingface.py) and of GGUF files (gguf.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec


class TokenTable(msgspec.Struct, frozen=True):
    """The tokens of a model, for the grammar compiler."""

    tokens: list[bytes]  # the bytes of each token of the model; empty for an id without a token
    eos_ids: frozenset[int]
    control_ids: frozenset[int]  # tokens that are no text; a grammar names them by id


class Tokenizer(Protocol):
    """Converts text to ids and back, and has the special tokens and chat templates of a model. Thread-safe."""

    vocab_size: int  # of the tokenizer; that of the model may be larger
    special_tokens: dict[str, str]  # texts by the names of template variables: bos_token, eos_token, …
    # Tokens that control the model: markers of turns, of reasoning, of calls. No text of a message becomes one.
    control_ids: frozenset[int]
    control_tokens: dict[str, int]  # the same tokens by their texts
    special_ids: frozenset[int]  # those control tokens that the files of the model declare as special
    eos_ids: frozenset[int]  # tokens that end an answer
    warnings: tuple[str, ...]  # for the user, e.g. that the files contradict each other
    templates: dict[str, str]  # chat templates by name: "default", and "tool_use" for some models

    def __hash__(self) -> int: ...

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of the control tokens, and of other tokens that are one token in any text."""
        ...

    @property
    def kind(self) -> str:
        """A description for error messages."""
        ...

    def id_of(self, token: str) -> int | None:
        """The id of the token with this exact text; None if the vocabulary has no such token."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a rendered prompt. Text that `protect` marked becomes no control token.

        `add_special_tokens`: add the tokens around a raw prompt (usually BOS). A chat template writes them itself.
        """
        ...

    def protect(self, value: Any, *, own: bool = False) -> Any:
        """A copy of JSON-like data; text in its strings that can become a control token is marked as plain text.

        `own`: the data is the text of an earlier answer, in which the markers stay that the parser of answers acts on.
        Tokens that the files of the model declare as special never stay.
        """
        ...

    def decode(self, ids: Sequence[int], *, hidden: frozenset[int] = frozenset()) -> str:
        """The text of the ids, without `hidden` ids. Spaces are not cleaned up."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token adds to a text, possibly a part of a character; empty for an unknown id."""
        ...

    def vocabulary(self, size: int) -> TokenTable:
        """The tokens for the grammar compiler. `size`: vocabulary size of the model.

        Raises ValueError if the bytes of a token depend on the tokens beside it.
        """
        ...
