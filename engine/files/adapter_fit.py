"""Checks a registered adapter against the model that it is loaded for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType

from ..errors import ModelRefused
from ..lora import Adapter
from .adapter_config import PLAIN_LORA
from .adapter_files import ABSORBED, AdapterFiles, Factors, is_gguf, read_adapter
from .peft_modules import HEAD
from .tensor_files import FLOATS, StoredTensor
from .tensor_names import EMBEDDING as EMBEDDING_TENSOR
from .tensor_names import HEAD as HEAD_TENSOR
from .tensor_values import is_copy

WITHOUT_COPIES = "save the adapter again with save_embedding_layers=False"


@contextmanager
def refusals_of(adapter: Adapter) -> Iterator[None]:
    """A context in which a ModelRefused gets the name of the adapter."""
    try:
        yield
    except ModelRefused as error:
        raise ModelRefused(f"adapter {adapter.name}: {error}", error.hint) from error


def read_registered(adapter: Adapter) -> AdapterFiles:
    """Read a registered adapter. Raises ModelRefused, also if its files have changed."""
    files = read_adapter(adapter.path)
    if files.version != adapter.version:
        raise ModelRefused("its files have changed", "load the adapter again")
    return files


def read_for_model(
    adapter: Adapter,
    shapes: Mapping[str, tuple[int, int]],
    max_rank: int,
    base: Mapping[str, StoredTensor],
    tied_embedding: str = "",
) -> AdapterFiles:
    """Read a registered adapter. Raises ModelRefused if its files have changed, or if it does not fit the model.

    `shapes`: (out_features, in_features) of each module of the base model that can have factors. The in_features of an
    embedding are the size of the vocabulary. `base`: the tensors in the files of the base model. `tied_embedding`: the
    embedding that is the output head as well. Its factors in an adapter of mlx-lm also change the head, as mlx-lm
    computes it. In an adapter of PEFT they do not.
    """
    with refusals_of(adapter):
        files = read_registered(adapter)
        if is_gguf(files.path):
            raise ModelRefused("it is a GGUF file, but the model is not", "use the adapter in the format of PEFT")
        check_copies(files, base)
        _check_shapes(files, shapes, max_rank)
    embedding = files.factors.get(tied_embedding)
    if embedding is None or not embedding.transposed:
        return files
    head = Factors(embedding.b, embedding.a, transposed=False, scale=embedding.scale)
    return replace(files, factors=MappingProxyType({**files.factors, HEAD: head}))


def _check_shapes(files: AdapterFiles, shapes: Mapping[str, tuple[int, int]], max_rank: int) -> None:
    if files.rank > max_rank:
        raise ModelRefused(
            f"rank {files.rank}, but the limit is {max_rank}",
            f"raise the setting adapter_rank to {files.rank} or more",
        )
    for module, factors in files.factors.items():
        if module not in shapes:
            raise _without_factors(module)
        expected = shapes[module]
        actual = factors.out_features, factors.in_features
        if actual != expected:
            raise ModelRefused(
                f"{module} is {actual[0]} x {actual[1]}, but in the model {expected[0]} x {expected[1]}; the adapter "
                "is for another base model"
            )


def check_copies(files: AdapterFiles, base: Mapping[str, StoredTensor]) -> None:
    """Raises ModelRefused for a tensor of the base model in the adapter's file that differs from the one in `base`."""
    for name, copy in files.copies.items():
        original = base.get(name)
        if original is None and name == HEAD_TENSOR:
            original = base.get(EMBEDDING_TENSOR)  # a tied head
        if original is None or {copy.dtype, original.dtype} - set(FLOATS):
            raise ModelRefused(
                f"it has the tensor {name!r:.200} of its base model, and the files of the model have no float tensor "
                "of this name to compare it with",
                WITHOUT_COPIES if name in (EMBEDDING_TENSOR, HEAD_TENSOR) else PLAIN_LORA,
            )
        if not is_copy(copy, original):
            raise ModelRefused(
                f"its tensor {name!r:.200} differs from that of the base model; trained "
                "embeddings, heads and biases beside LoRA factors are not supported",
                "use the base model that the adapter was trained on, or merge the adapter into its base model",
            )


def _without_factors(module: str) -> ModelRefused:
    """The error for an adapter that changes a module that cannot have factors."""
    if module.split(".")[-1] == ABSORBED:
        return ModelRefused(
            f"it changes {module!r:.200}, but adapters of {ABSORBED} are not supported",
            "use an adapter whose target modules are other projections, such as q_proj and o_proj",
        )
    return ModelRefused(f"the model has no module {module!r:.200}")
