"""The sampling parameters of a request, completed with the defaults of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from ...engine.request import Sampling
from ..errors import InvalidRequest
from ..frames import Generate

MAX_BIAS = 100.0

# Defaults of OpenAI's API, for fields that neither the request nor the model's generation_config.json has.
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def sampling_of(asked: Generate, recommended: Mapping[str, float], *, seed: int, vocab_size: int) -> Sampling:
    """`recommended`: defaults of the model by field name (ModelFiles.generation).

    Raises InvalidRequest naming the parameter.
    """
    fields = msgspec.structs.asdict(asked)
    values: dict[str, Any] = {}
    for name, neutral in NEUTRAL.items():
        candidates = (fields[name], recommended.get(name), neutral)
        values[name] = next(value for value in candidates if value is not None)
    values["top_k"] = int(values["top_k"])
    try:
        return Sampling(
            **values,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            logit_bias=_bias(asked.logit_bias, vocab_size),
            seed=seed % 2**64,
            logprobs=asked.logprobs,
        )
    except ValueError as error:  # the message starts with the name of the field
        raise InvalidRequest(str(error), param=str(error).split()[0]) from None


def _bias(asked: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in asked.items():
        if not (key.isascii() and key.isdigit()) or int(key) >= vocab_size:
            raise InvalidRequest(
                f"logit_bias: {key!r} is not a token id of this model (0…{vocab_size - 1})", param="logit_bias"
            )
        if not math.isfinite(value) or abs(value) > MAX_BIAS:
            raise InvalidRequest(f"logit_bias of {key} must be in -100…100, not {value}", param="logit_bias")
        pairs.append((int(key), float(value)))
    return tuple(pairs)
