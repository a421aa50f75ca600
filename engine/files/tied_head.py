"""The output head of a tied model whose files have both a head and an embedding."""

from __future__ import annotations

from dataclasses import replace

from .model_files import ModelFiles
from .tensor_files import StoredTensor, refusing_unreadable
from .tensor_names import EMBEDDING, HEAD

CHUNK = 2**22  # bytes


def with_stored_head(files: ModelFiles) -> ModelFiles:
    """The files with the head that transformers uses: a stored head is a head of its own, with a warning, unless its
    values are those of the embedding. Reads both tensors up to the first difference. Raises ModelRefused."""
    head, embedding = files.tensors.get(HEAD), files.tensors.get(EMBEDDING)
    if not files.config.tie_embeddings or head is None or embedding is None or _are_equal(head, embedding):
        return files
    warning = f"{HEAD} is used, because it differs from the embedding, contrary to tie_word_embeddings in config.json"
    return replace(files, config=replace(files.config, tie_embeddings=False), warnings=(*files.warnings, warning))


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors have the same bytes. Tensors of different dtypes count as different."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with refusing_unreadable(one.file), one.file.open("rb") as left, other.file.open("rb") as right:
        left.seek(one.start)
        right.seek(other.start)
        for start in range(0, one.num_bytes, CHUNK):
            length = min(CHUNK, one.num_bytes - start)
            if left.read(length) != right.read(length):
                return False
    return True
