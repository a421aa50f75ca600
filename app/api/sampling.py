"""The fields that chats and completions have in common: sampling, limits of the answer, structured output."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from ...engine.ranges import RANGES
from ..errors import InvalidRequest, UnsupportedParameter
from ..frames import ResponseFormat
from .body import WireBody, without_none
from .formats import Format, TextFormat, constraint
from .inputs import TargetBody, TokenId

TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
SMALLEST_TOP_P = 1e-7  # keeps only the likeliest token, as the value 0 of other servers: a vocabulary has fewer tokens

StopText = Annotated[str, Meta(max_length=1024)]  # an empty one stops nothing

# Fields with a range, and the name of the range. SamplingBody checks them, because an error of msgspec does not
# show the invalid value.
RANGED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "repeat_penalty": "repetition_penalty",
    "logprobs": "logprobs",
    "top_logprobs": "logprobs",
}
# Values outside a range that other servers accept -> value in the range; None: the parameter is absent.
CONVERTED: Mapping[str, Mapping[float, float | None]] = {
    "max_completion_tokens": {-1: None},
    "max_tokens": {-1: None},
    "top_k": {-1: 0},
    "top_p": {0: SMALLEST_TOP_P},
}
# Samplers of other servers that localllm lacks, and the values with which they are off.
SAMPLERS: Mapping[str, tuple[float, ...]] = {
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "mirostat": (0,),
    "repeat_last_n": (-1,),
    "tfs_z": (1,),
    "top_n_sigma": (-1, 0),
    "typical_p": (1,),
    "xtc_probability": (0,),
}


def ranged(name: str, low: float | None = None) -> Meta:
    """The range of a parameter, for the JSON schema. `low`: the lowest accepted value, if it is below the range."""
    limits = RANGES[name]
    lower = "exclusiveMinimum" if limits.excludes_low and low is None else "minimum"
    return Meta(extra_json_schema={lower: limits.low if low is None else low, "maximum": limits.high})


Temperature = Annotated[float, ranged("temperature")]
TopP = Annotated[float, ranged("top_p", low=0)]  # 0: only the likeliest token
TopK = Annotated[int, ranged("top_k", low=-1)]  # 0 and -1: no limit
MinP = Annotated[float, ranged("min_p")]
Count = Annotated[
    int, Meta(extra_json_schema={"minimum": -1, "not": {"const": 0}, "maximum": RANGES["max_tokens"].high})
]  # -1: until the context is full
MinCount = Annotated[int, ranged("min_tokens")]
Seed = Annotated[int, ranged("seed", low=-(2**63))]  # OpenAI's seeds are signed; a negative one is taken modulo 2^63
Penalty = Annotated[float, ranged("presence_penalty")]
RepetitionPenalty = Annotated[float, ranged("repetition_penalty")]
TopLogprobs = Annotated[int, ranged("logprobs")]
Bias = Annotated[float, ranged("logit_bias")]
Off = Annotated[float, Meta(description="A sampler that localllm lacks: only the value that turns it off.")]


class StreamOptions(WireBody):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingBody(TargetBody, kw_only=True):
    """The fields that chats and completions have in common."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: Count | None = None
    min_tokens: MinCount | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repeat_penalty: RepetitionPenalty | None = None  # llama.cpp's name of repetition_penalty
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Format | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    dry_multiplier: Off | None = None
    dynatemp_range: Off | None = None
    mirostat: Off | None = None
    repeat_last_n: Off | None = None
    tfs_z: Off | None = None
    top_n_sigma: Off | None = None
    typical_p: Off | None = None
    xtc_probability: Off | None = None
    # Fields without effect: see ignored.py.
    metadata: Annotated[dict[str, str], Meta(max_length=1024)] | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    cache_prompt: bool | None = None
    id_slot: int | None = None
    priority: int | None = None
    skip_special_tokens: bool | None = None  # only true
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    dynatemp_exponent: float | None = None
    mirostat_eta: float | None = None
    mirostat_tau: float | None = None
    xtc_threshold: float | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Check ranges, and rules that the type of a single field cannot express. Raises InvalidRequest."""
        for field, name in RANGED.items():
            value = self._value(field)
            if value is not None and value not in RANGES[name]:
                raise InvalidRequest(f"{field} must be {RANGES[name]}, not {getattr(self, field)}", param=field)
        self._check_samplers()
        self._check_logit_bias()
        self.check_lora()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        penalties = {self.repetition_penalty, self.repeat_penalty} - {None}
        if len(penalties) > 1:
            raise InvalidRequest("repetition_penalty and repeat_penalty differ", param="repeat_penalty")
        if self.skip_special_tokens is False:
            raise UnsupportedParameter(
                "skip_special_tokens: answers show no control tokens", param="skip_special_tokens"
            )

    def _value(self, field: str) -> Any:
        """The value of a field. Values outside the range that other servers accept are converted: see CONVERTED; a
        negative `seed` to its value modulo 2^63."""
        value: Any = getattr(self, field, None)
        if field == "seed" and value is not None and -(2**63) <= value < 0:
            return value % 2**63
        return CONVERTED.get(field, {}).get(value, value)

    def _check_samplers(self) -> None:
        for name, off in SAMPLERS.items():
            value = getattr(self, name)
            if value is not None and value not in off:
                raise UnsupportedParameter(
                    f"{name}: this sampler is not supported; only {off[0]} turns it off",
                    hint="use temperature, top_k, top_p, min_p and the penalties",
                    param=name,
                )

    def _check_logit_bias(self) -> None:
        for token, bias in (self.logit_bias or {}).items():
            if not TOKEN_ID.fullmatch(token):
                raise InvalidRequest(f"logit_bias: {token[:40]!r} is not a token id", param="logit_bias")
            if bias not in RANGES["logit_bias"]:
                raise InvalidRequest(
                    f"logit_bias of token {token} must be {RANGES['logit_bias']}, not {bias}", param="logit_bias"
                )

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments for a Generate frame, without the fields that the client omits: the frame has defaults."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        penalty = self.repeat_penalty if self.repetition_penalty is None else self.repetition_penalty
        arguments = {
            "temperature": self.temperature,
            "top_p": self._value("top_p"),
            "top_k": self._value("top_k"),
            "min_p": self.min_p,
            "n": self.n,
            "min_tokens": self.min_tokens,
            "stop": list(filter(None, stop)) if stop else None,
            "stop_ids": self.stop_token_ids,
            "seed": self._value("seed"),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": penalty,
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
            "ignore_eos": self.ignore_eos,
            "response_format": self._response_format(),
        }
        return without_none(arguments) | self.adapter_arguments()

    def _response_format(self) -> ResponseFormat | None:
        formats = {
            "response_format": None if isinstance(self.response_format, TextFormat) else self.response_format,
            "regex": self.regex,
            "choice": self.choice,
            "guided_json": self.guided_json,
            "guided_regex": self.guided_regex,
            "guided_choice": self.guided_choice,
        }
        present = without_none(formats)
        if not present:
            return None
        (name, value), *others = present.items()
        if others:
            raise InvalidRequest(f"only one of {', '.join(present)} may be given", param=others[0][0])
        return constraint(name, value)
