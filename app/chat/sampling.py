"""The sampling parameters of a request, completed with the defaults of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...engine.request import Sampling
from ..errors import InvalidRequest
from ..frames import Generate

# Defaults of OpenAI's API, for fields that neither the request nor the model's generation_config.json has.
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


BAN = -100.0  # the logit_bias of a token that an answer must not have, as in OpenAI's API


def defaults(recommended: Mapping[str, float]) -> dict[str, float]:
    """The values of the parameters that a request omits. `recommended`: those of the model (ModelFiles.generation)."""
    return NEUTRAL | {name: recommended[name] for name in NEUTRAL if name in recommended}


def sampling_of(
    frame: Generate, recommended: Mapping[str, float], suppressed: Iterable[int] = (), *, seed: int, vocab_size: int
) -> Sampling:
    """The sampling parameters of one choice. Only the low 64 bits of `seed` are used.

    `recommended`: defaults of the model by field name (ModelFiles.generation). `suppressed`: ModelFiles.suppressed.
    Raises InvalidRequest, which names the parameter, for a value out of range or a token id that is not in the
    vocabulary.
    """
    check_token_ids("logit_bias", frame.logit_bias, vocab_size)
    values: dict[str, Any] = defaults(recommended)
    for name in NEUTRAL:
        requested = getattr(frame, name)
        if requested is not None:
            values[name] = requested
    values["top_k"] = int(values["top_k"])
    try:
        return Sampling(
            **values,
            presence_penalty=frame.presence_penalty,
            frequency_penalty=frame.frequency_penalty,
            logit_bias=tuple((frame.logit_bias | dict.fromkeys(suppressed, BAN)).items()),
            seed=seed % 2**64,
            logprobs=frame.logprobs,
        )
    except ValueError as error:  # the message starts with the name of the field
        raise InvalidRequest(str(error), param=str(error).split()[0]) from None


def check_token_ids(param: str, tokens: Iterable[int], vocab_size: int) -> None:
    """Raises InvalidRequest if a token id in the parameter `param` is not in the vocabulary."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{param}: token id {token} is not in the model's vocabulary of {vocab_size}", param=param
            )
