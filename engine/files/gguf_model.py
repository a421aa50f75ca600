"""Reads a GGUF model: one file, or the shards of one model. Reads the headers only, no tensor data.

The metadata keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ..errors import ModelRefused
from .families import LayerKind
from .fields import Fields
from .generation_config import recommended
from .gguf import GgufHeader, parse_header
from .gguf_shards import SUFFIX, parse_shard
from .gguf_values import MAX_HEADER, Array, HeaderCut, Value
from .model_config import EMPTY_CONFIG, MAX_VOCAB, ModelConfig
from .rope_config import Rope
from .tensor_files import StoredTensor, refusing_unreadable, regular_size

MAX_SHARDS = 999  # maximum number of shards of a model
MAX_LAYERS = 512  # the limits of llama.cpp
MAX_EXPERTS = 1024
MAX_WINDOW = 2**27  # positions
PROJECTOR = "mmproj"  # in the names of the image encoders that lie beside a model

_FIRST_BYTES = 512 * 2**10  # bytes of the first read of a file
_GROWTH = 4  # factor by which each further read increases the total of bytes
_AGAIN = "download the model again"
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # of tokenizer.ggml
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_EPSILONS = ("layer_norm_rms_epsilon", "layer_norm_epsilon", "group_norm_epsilon")
_ROPE_KINDS: Mapping[str, Literal["linear", "yarn", "longrope"]] = MappingProxyType(
    {"linear": "linear", "yarn": "yarn", "longrope": "longrope"}
)
# The names of sampling parameters after "general.sampling.", where they differ from those of Sampling.
_SAMPLING = MappingProxyType({"temperature": "temp", "repetition_penalty": "penalty_repeat"})


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The validated headers of a model."""

    shards: tuple[Path, ...]  # in their order; one path if the model is one file
    metadata: Mapping[str, Value]  # of the first shard, which has the metadata of the model
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]  # tensor name -> tensor, in all shards; the last dimension is contiguous
    sampling: Mapping[str, float]  # sampling parameters recommended by the authors, with the names of Sampling
    suppressed: tuple[int, ...]  # tokens that an answer must not have
    warnings: tuple[str, ...]  # values that are not used


def model_file(path: Path) -> Path | None:
    """The GGUF file, or the first shard, of the model at `path`; None if `path` is not a GGUF model.

    `path`: a .gguf file, or a folder with the GGUF files of one model. Raises ModelRefused for a folder with several.
    """
    if path.suffix.lower() == SUFFIX and not path.is_dir():
        return shard_paths(path)[0]
    if not path.is_dir():
        return None
    with refusing_unreadable(path):
        files = [file for file in path.glob(f"*{SUFFIX}") if PROJECTOR not in file.name.lower()]
    firsts = sorted({shard_paths(file)[0] for file in files})
    if len(firsts) > 1:
        names = ", ".join(file.name for file in firsts[:5])
        raise ModelRefused(f"{path.name} has {len(firsts)} GGUF models: {names}", "name one of the files")
    return firsts[0] if firsts else None


def shard_paths(file: Path) -> tuple[Path, ...]:
    """The paths of all shards of the model that `file` belongs to, by its name. Raises ModelRefused."""
    shard = parse_shard(file.name)
    if shard is None:
        return (file,)
    if not 1 <= shard.index <= shard.count <= MAX_SHARDS:
        raise ModelRefused(f"{file.name}: a shard has a number from 1 to the number of shards, at most {MAX_SHARDS}")
    return tuple(map(file.with_name, shard.siblings))


def read_header(file: Path) -> GgufHeader:
    """The validated header of a GGUF file. Raises ModelRefused."""
    size = regular_size(file)
    head = b""
    needed = _FIRST_BYTES
    with refusing_unreadable(file), file.open("rb") as stream:
        while True:
            length = min(max(needed, _GROWTH * len(head)), size, MAX_HEADER)
            head += stream.read(length - len(head))
            if len(head) < length:
                raise ModelRefused(f"{file.name} has {len(head)} bytes, not {size}", _AGAIN)
            try:
                return parse_header(file.name, head, size)
            except HeaderCut as cut:
                needed = cut.needed


def read_gguf(file: Path) -> GgufModel:
    """The model of a GGUF file, or of all its shards. Raises ModelRefused."""
    shards = shard_paths(file)
    headers = [_read_shard(shard) for shard in shards]
    for index, header in enumerate(headers):
        _check_split(shards, index, header)
    metadata = MappingProxyType(headers[0].metadata)
    config = parse_metadata(metadata, shards[0].name)
    tensors = _tensors(shards, headers)
    _check_number_of_tensors(shards[0], metadata, tensors)
    fields = Fields(metadata, shards[0].name)
    sampling = recommended(fields, "general.sampling.", _SAMPLING)
    return GgufModel(
        shards=shards,
        metadata=metadata,
        config=config,
        tensors=MappingProxyType(tensors),
        # The file has 32 bits: 0.2 is 0.20000000298.
        sampling=MappingProxyType({name: float(f"{value:.7g}") for name, value in sampling.items()}),
        suppressed=_suppressed(metadata, config.vocab_size),
        warnings=tuple(fields.warnings),
    )


def _read_shard(shard: Path) -> GgufHeader:
    with refusing_unreadable(shard):
        is_present = shard.exists()
    if not is_present and parse_shard(shard.name):
        raise ModelRefused(f"shard {shard.name} is missing", _AGAIN)
    return read_header(shard)


def _check_split(shards: Sequence[Path], index: int, header: GgufHeader) -> None:
    """Raises ModelRefused unless the metadata of a shard agrees with its name."""
    fields = Fields(header.metadata, shards[index].name, hint=_AGAIN)
    count = fields.integer("split.count", 0, MAX_SHARDS, 0)
    number = fields.integer("split.no", 0, MAX_SHARDS, 0)
    if max(count, 1) != len(shards):
        raise fields.refuse("split.count", f"{len(shards)}, as the name of the file says")
    if number != index:
        raise fields.refuse("split.no", f"{index}, as the name of the file says")


def _tensors(shards: Sequence[Path], headers: Sequence[GgufHeader]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for shard, header in zip(shards, headers, strict=True):
        for entry in header.tensors:
            tensor = StoredTensor(shard, entry.dtype, entry.shape[::-1], entry.start, entry.stop)
            other = tensors.setdefault(entry.name, tensor)
            if other is not tensor:
                raise ModelRefused(f"tensor {entry.name!r} is in both {other.file.name} and {shard.name}")
    return tensors


def _check_number_of_tensors(file: Path, metadata: Mapping[str, Value], tensors: Mapping[str, StoredTensor]) -> None:
    expected = Fields(metadata, file.name).integer("split.tensors.count", 0, 2**31 - 1, len(tensors))
    if expected != len(tensors):
        raise ModelRefused(f"{file.name}: its shards have {len(tensors)} tensors, expected {expected}", _AGAIN)


def parse_metadata(metadata: Mapping[str, Value], where: str) -> ModelConfig:
    """The configuration of a model. Fields that only backends of other formats need are empty.

    Raises ModelRefused with the name of a wrong key, and for a file that is not a model.
    """
    fields = Fields(metadata, where)
    kind = fields.text("general.type", "model")
    if kind != "model":
        raise ModelRefused(f"{where} is not a model: its general.type is {kind!r:.50}", "name the file of a model")
    architecture = fields.text("general.architecture")
    if architecture == "clip":
        raise ModelRefused(f"{where} is an image encoder, not a language model", "name the file of a language model")
    heads = _count(fields, f"{architecture}.attention.head_count")
    hidden = fields.integer(f"{architecture}.embedding_length", 1, 2**20)
    positions = fields.integer(f"{architecture}.context_length", 1, 2**27)
    head_dim = fields.integer(f"{architecture}.attention.key_length", 0, 2**16, hidden // max(heads, 1))
    _check_architecture(fields, architecture)
    _check_positions(fields, architecture, heads, head_dim)
    vocab = _vocab_size(fields, architecture, metadata)
    return replace(
        EMPTY_CONFIG,
        model_type=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=_count(fields, f"{architecture}.feed_forward_length"),
        num_layers=fields.integer(f"{architecture}.block_count", 1, MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=_count(fields, f"{architecture}.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=positions,
        window=_count(fields, f"{architecture}.attention.sliding_window"),
        ropes=_ropes(fields, architecture, head_dim, positions),
        eos_ids=_end_ids(metadata, vocab),
    )


def _check_architecture(fields: Fields, architecture: str) -> None:
    """Raises ModelRefused for values on which llama.cpp asserts."""
    fields.choice(f"{architecture}.rope.scaling.type", _ROPE_SCALINGS, "none")
    for key in _EPSILONS:
        fields.number(f"{architecture}.attention.{key}", 0.0, 1.0, 0.0)
    experts = fields.integer(f"{architecture}.expert_count", 0, MAX_EXPERTS, 0)
    used = _count(fields, f"{architecture}.expert_used_count")
    if not min(experts, 1) <= used <= experts:
        raise fields.refuse(f"{architecture}.expert_used_count", f"a number in {min(experts, 1)}…{experts}")
    groups = fields.integer(f"{architecture}.expert_group_count", 0, max(0, experts - 1), 0)
    if groups > 1:
        fields.integer(f"{architecture}.expert_group_used_count", 1, groups - 1)
        if experts % groups:
            raise fields.refuse(f"{architecture}.expert_group_count", f"a divisor of {experts}")
    layers = fields.integer(f"{architecture}.block_count", 1, MAX_LAYERS)
    fields.integer(f"{architecture}.nextn_predict_layers", 0, layers, 0)


def _check_positions(fields: Fields, architecture: str, heads: int, head_dim: int) -> None:
    """Raises ModelRefused for RoPE dimensions and sliding windows with which llama.cpp fails an assertion or never
    ends."""
    window = f"{architecture}.attention.sliding_window"
    if _count(fields, window) > MAX_WINDOW:
        raise fields.refuse(window, f"a number up to {MAX_WINDOW}")
    latent = fields.integer(f"{architecture}.attention.key_length_mla", 0, 2**16, 0)
    for layers in ("", "_swa"):
        key = f"{architecture}.rope.dimension_count{layers}"
        width = fields.integer(f"{architecture}.attention.key_length{layers}", 0, 2**16, head_dim)
        limit = max(width, latent)
        lowest = 0 if latent else 2  # latent attention may have no rope
        count = fields.integer(key, 0, 2**16, lowest)
        if heads and key in fields and (count % 2 or not lowest <= count <= limit):
            raise fields.refuse(key, f"an even number in {lowest}…{limit}")


def _count(fields: Fields, key: str, default: int = 0) -> int:
    """A number, or the largest number of an array with one number for each layer; `default` if the key is absent."""
    value = fields.get(key)
    if isinstance(value, Array):
        counts = [count for count in value.values if type(count) is int]
        if len(counts) != value.count:
            raise fields.refuse(key, "integers")
        return max(counts, default=0)
    return fields.integer(key, 0, 2**31 - 1, default)


def _vocab_size(fields: Fields, architecture: str, metadata: Mapping[str, Value]) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Array):
        return tokens.count
    return fields.integer(f"{architecture}.vocab_size", 0, MAX_VOCAB, 0)


def _end_ids(metadata: Mapping[str, Value], vocab: int) -> tuple[int, ...]:
    """The end-of-generation ids. As in llama.cpp, an id outside the vocabulary counts as absent."""
    ids = (metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS)
    return tuple(dict.fromkeys(token for token in ids if type(token) is int and 0 <= token < vocab))


def _ropes(fields: Fields, architecture: str, head_dim: int, positions: int) -> Mapping[LayerKind, Rope]:
    """The rope of the model; empty if it has none."""
    prefix = f"{architecture}.rope"
    dimensions = fields.integer(f"{prefix}.dimension_count", 0, 2**16, head_dim)
    if not dimensions:
        return MappingProxyType({})
    rope = Rope(
        kind=_ROPE_KINDS.get(fields.text(f"{prefix}.scaling.type", ""), "default"),
        theta=fields.number(f"{prefix}.freq_base", 0.0, 1e15, 10_000.0),
        rotary_dim=dimensions,
        factor=fields.number(f"{prefix}.scaling.factor", 0.0, 1e6, 1.0),
        original_positions=fields.integer(f"{prefix}.scaling.original_context_length", 0, 2**27, positions),
    )
    return MappingProxyType({"full": rope})


def _suppressed(metadata: Mapping[str, Value], vocab: int) -> tuple[int, ...]:
    """As in llama.cpp, ids outside the vocabulary are left out."""
    tokens = metadata.get("tokenizer.ggml.suppress_tokens")
    values = tokens.values if isinstance(tokens, Array) else ()
    return tuple(token for token in values if type(token) is int and 0 <= token < vocab)
