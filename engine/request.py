"""A request, its progress, and the tokens or the hidden state that one step adds to it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from .ranges import HOT, RANGES, check_range

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .grammar import Grammar
    from .history import TokenHistory
    from .kv import Lease
    from .lora import Adapter, Namespace

Finish = Literal["stop", "length", "cancelled", "failed", "no_memory"]

# The fields of Sampling that are one number, except the temperature.
_NUMBERS = (
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters for drawing a token from the logits. The defaults give greedy decoding.

    Order of application: logit_bias, penalties, allowed-token mask, temperature, top_k, top_p, min_p, draw.
    Log-probabilities are those of the raw logits (before everything above), as OpenAI reports them.
    """

    temperature: float = 0.0  # 0 is greedy; so is anything below 1e-5
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # for tokens in the prompt or the output (CTRL, 2019)
    presence_penalty: float = 0.0  # for tokens in the output
    frequency_penalty: float = 0.0  # for tokens in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number that is added to its logit)
    seed: int = 0  # unsigned 64 bits; the draw depends only on seed and position, not on the batch
    logprobs: int | None = None  # k <= 20: list the drawn token and the k likeliest tokens; None: list none

    def __post_init__(self) -> None:
        if self.temperature not in HOT:
            raise ValueError(f"temperature must be {HOT}, not {self.temperature}")
        for name in _NUMBERS:
            check_range(name, getattr(self, name))
        if self.logprobs is not None:
            check_range("logprobs", self.logprobs)
        for token, value in self.logit_bias:
            if value not in RANGES["logit_bias"]:
                raise ValueError(f"logit_bias of token {token} must be {RANGES['logit_bias']}, not {value}")

    @property
    def reads_history(self) -> bool:
        """Whether penalties are on. Then a draw depends on all tokens before it, so the host must know them first."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and the parameters of its answer. Progress is in Sequence.

    The answer is tokens, or with `wants_hidden` the hidden state of the last token of the prompt.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int  # maximum number of tokens to generate: at least 1, or 0 for a hidden state
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence ids and stop token ids; empty for ignore_eos
    adapter: Adapter | None = None
    grammar: Grammar | None = None  # a fresh matcher for this request alone
    adapter_scale: float = 1.0  # factor that multiplies the adapter's contribution
    wants_hidden: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("the prompt is empty: at least one token is needed")
        if not self.wants_hidden:
            check_range("max_tokens", self.max_tokens)
        elif self.max_tokens or self.grammar is not None:
            raise ValueError("a request for a hidden state draws no tokens: max_tokens must be 0, without a grammar")
        check_range("adapter_scale", self.adapter_scale)
        if self.adapter is None and self.adapter_scale != 1.0:
            raise ValueError("adapter_scale needs an adapter")

    @property
    def namespace(self) -> Namespace:
        """The namespace in the prefix tree: sequences of one namespace may share the KV of equal tokens."""
        return None if self.adapter is None else (self.adapter, self.adapter_scale)


@dataclass(slots=True, eq=False)
class Sequence:
    """Progress of a request. `len(tokens) + unknown - computed` positions are left to compute.

    tokens    [ prompt ........ | generated and known ]
    unknown                                            [ on the device, not read back yet ]
    computed  [ KV written, or planned .................. ]

    A step with drafts counts as one unknown token until its commit, when the number of drawn tokens is known.
    """

    request: Request
    _: KW_ONLY
    tokens: list[int] = field(init=False)
    limit: int = field(init=False)  # number of tokens at which the sequence ends; a hidden state counts as a token
    computed: int = 0
    unknown: int = 0  # number of tokens or hidden states that a running step returns: 0 or 1
    drafting: bool = False  # whether the running step has drafts of this sequence
    last_row: int = -1  # index of this sequence's row in the step that draws the unknown token
    adapter_slot: int = 0  # 0 is the base model
    lease: Lease | None = None
    history: TokenHistory | None = None  # None: no penalties, so sampling does not read it
    finish: Finish | None = None
    preemptions: int = 0
    overtaken: int = 0  # number of later sequences that started while this one waited for its adapter
    cached: int = 0  # prompt tokens that came from the prefix cache at first admission

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.limit = len(self.tokens) + max(self.request.max_tokens, 1)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities (natural logarithm) of a drawn token and of the likeliest tokens at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first


class Delta(NamedTuple):  # a NamedTuple, because it is quick to create
    """The tokens, or the hidden state, that one step adds to one request."""

    request_id: str
    tokens: tuple[int, ...]  # a stop id, if one was drawn, is included as the request's last token
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token; empty if the request does not list them
    finish: Finish | None = None  # set on the request's last delta, and on no other
    cached: int = 0  # prompt tokens served from the prefix cache (set on every delta)
    error: str = ""  # the reason if `finish` is "failed" or "no_memory"
    hidden: NDArray[np.float32] | None = None  # [hidden size] the normalised last hidden state, if the request wants it
