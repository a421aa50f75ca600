"""The port to a grammar, and the arithmetic of allowed-token masks.

The compiler (JSON schema, regex, choice) is in app/chat, beside the tokenizer; the engine only reads the masks.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Grammar(Protocol):
    """A matcher for one request. Not shared, not thread-safe."""

    def allowed(self) -> NDArray[np.uint32]:
        """[ceil(vocab / 32)] uint32, one bit per token: the tokens that may come next."""
        ...

    def accept(self, token: int) -> None:
        """Advance by the sampled token."""
        ...

    def copy(self) -> Grammar:
        """Another matcher in the same state, for the masks of drafts."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the text is complete, so that no other token may follow. Then the sequence stops."""
        ...


def allowed_tokens(grammar: Grammar, vocab_size: int) -> NDArray[np.uint32]:
    """The grammar's mask of allowed tokens. Raises ValueError if the mask does not match the vocabulary size, or if it
    allows no token."""
    mask = grammar.allowed()
    if mask.dtype != np.uint32 or mask.shape != (-(-vocab_size // 32),):
        raise ValueError(f"the mask ({mask.dtype} {mask.shape}) does not match the vocabulary size {vocab_size}")
    if not mask.any():
        raise ValueError("the grammar allows no token")
    return mask


def all_tokens(vocab_size: int) -> NDArray[np.uint32]:
    """A new mask of all tokens: [ceil(vocab_size / 32)] uint32."""
    words = -(-vocab_size // 32)
    mask = np.full(words, 0xFFFFFFFF, dtype=np.uint32)
    mask[-1] >>= np.uint32(words * 32 - vocab_size)
    return mask


def unpack_mask(masks: NDArray[np.uint32], vocab_size: int) -> NDArray[np.bool_]:
    """Unpack bit masks [rows, words] to booleans [rows, vocab_size]. The lowest bit of a word is the first token."""
    as_bytes = np.ascontiguousarray(masks).view(np.uint8)
    return np.unpackbits(as_bytes, axis=-1, bitorder="little")[..., :vocab_size].astype(np.bool_)
