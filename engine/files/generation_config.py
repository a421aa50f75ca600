"""generation_config.json -> the sampling parameters that the authors recommend, and the tokens that end an answer.

No value of this file changes a logit. So a wrong one is a warning, and has the meaning of an absent one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from ..errors import ModelRefused
from .fields import Fields
from .json_files import read_json

GENERATION = "generation_config.json"
_RANGES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "temperature": (0.0, 100.0),
        "top_k": (0.0, 2**31 - 1),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (1e-6, 100.0),
    }
)
_NEVER_SAMPLED = ("top_k", "top_p", "min_p")  # fields without a meaning for greedy answers
# Fields by which transformers changes answers and localllm does not, with the value that changes nothing.
_UNSUPPORTED: Mapping[str, object] = MappingProxyType(
    {
        "bad_words_ids": [],
        "begin_suppress_tokens": [],
        "encoder_repetition_penalty": 1.0,
        "epsilon_cutoff": 0.0,
        "eta_cutoff": 0.0,
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
        "min_length": 0,
        "min_new_tokens": 0,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "penalty_alpha": 0.0,
        "sequence_bias": {},
        "stop_strings": [],
        "top_h": None,
        "typical_p": 1.0,
    }
)


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The defaults of answers that a model has."""

    eos_ids: tuple[int, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)  # with the names of Sampling
    suppressed: tuple[int, ...] = ()  # tokens that an answer must not have
    warnings: tuple[str, ...] = ()  # values that are not used


def read_generation(folder: Path, vocab_size: int) -> GenerationConfig:
    """The values in the file of a model folder; the defaults if there is none. Ids are below `vocab_size`."""
    file = folder / GENERATION
    if not file.exists():
        return GenerationConfig()
    try:
        fields = Fields(read_json(file), GENERATION)
    except ModelRefused as error:
        return GenerationConfig(warnings=(f"{error}: the file is ignored",))
    generation = GenerationConfig(
        fields.ids("eos_token_id", vocab_size),
        _sampling(fields),
        fields.ids("suppress_tokens", vocab_size),
    )
    for key, neutral in _UNSUPPORTED.items():
        if key in fields and fields.get(key) != neutral:
            fields.warn(key, "ignored: localllm does not support this field")
    return replace(generation, warnings=tuple(fields.warnings))


def recommended(fields: Fields, prefix: str = "", names: Mapping[str, str] = MappingProxyType({})) -> dict[str, float]:
    """The sampling parameters in `fields`, with the names of Sampling. Warns of a value out of range, and ignores it.

    `names`: the names of the parameters in `fields` after `prefix`, where they differ.
    """
    sampling = {}
    for name, (low, high) in _RANGES.items():
        key = prefix + names.get(name, name)
        try:
            if key in fields:
                sampling[name] = fields.number(key, low, high)
        except ModelRefused:
            is_off = name == "top_k" and fields.get(key) == -1  # as in vLLM
            fields.warn(key, "read as no limit" if is_off else f"ignored: it must be a number in {low:g}…{high:g}")
    return sampling


def _sampling(fields: Fields) -> dict[str, float]:
    """The sampling parameters; `do_sample: false` means greedy."""
    sampling = recommended(fields)
    if _is_greedy(fields):
        return {key: value for key, value in sampling.items() if key not in _NEVER_SAMPLED} | {"temperature": 0.0}
    return sampling


def _is_greedy(fields: Fields) -> bool:
    try:
        return not fields.flag("do_sample", True)
    except ModelRefused:
        fields.warn("do_sample", "ignored: it must be true or false")
        return False
