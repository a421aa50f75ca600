"""The ops of the torch backends: for each op its reference in plain torch, and its implementations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from .activation import Activation
from .attention import Attention
from .kv import KV
from .layer import Layer
from .linear import Linear
from .lora import Lora
from .moe import Moe
from .norm import Norm
from .rope import Rope
from .sampling import Sampling
from .state import State

PACKAGES = re.compile(r"^localllm\.(kernels|backends)\.")  # of implementations; not displayed

# The ops that are replaced together with a family or an op. A fused op contains smaller ops, so it is replaced when one
# of them is replaced. Packed weights and prepared layers are private to a set of ops, so the ops that write them and
# the ops that read them are replaced together. An op without an entry of its own has the entry of its family.
TOGETHER: Mapping[str, tuple[str, ...]] = {
    "norm": ("kv.append", "layer"),
    "activation": ("moe.experts", "moe.pack_slices", "layer"),
    "rope": ("kv.append", "kv.append_latent", "layer"),
    "linear": ("linear.pack_slices", "moe.experts", "moe.pack_slices", "layer"),
    "linear.embedding": (),
    "moe": ("moe.experts", "moe.pack_slices", "layer"),
    "moe.route": ("layer",),
    "lora": ("layer",),
    "kv": ("layer",),
    "kv.store": ("kv.append", "layer"),
    "kv.copy_pages": (),
    "attention": ("layer",),
    "sampling": (),
    "state": (),
    "layer": ("layer",),
}


@dataclass(frozen=True, slots=True)
class Ops:
    """The implementations that a torch device uses. Every field defaults to the plain torch reference, so a new device
    computes correctly without kernels. `replace(ops, norm=Norm())` helps to find a wrong kernel."""

    norm: Norm = field(default_factory=Norm)
    activation: Activation = field(default_factory=Activation)
    rope: Rope = field(default_factory=Rope)
    linear: Linear = field(default_factory=Linear)
    moe: Moe = field(default_factory=Moe)
    lora: Lora = field(default_factory=Lora)
    kv: KV = field(default_factory=KV)
    attention: Attention = field(default_factory=Attention)
    sampling: Sampling = field(default_factory=Sampling)
    state: State = field(default_factory=State)
    layer: Layer = field(default_factory=Layer)

    def __iter__(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """("family.name", implementation) of every op."""
        for family in fields(self):
            implementations = getattr(self, family.name)
            for op in fields(implementations):
                yield f"{family.name}.{op.name}", getattr(implementations, op.name)

    def title(self, name: str) -> str:
        """Module and function that compute "family.name", or "reference"; for display."""
        implementation = dict(self)[name]
        if implementation is dict(Ops())[name]:
            return "reference"
        return f"{PACKAGES.sub('', implementation.__module__)}.{implementation.__name__}"

    def with_ops_of(self, other: Ops, names: Iterable[str]) -> Ops:
        """These ops, but the ops in `names` ("family.name" or "family") are those of `other`.

        The ops that TOGETHER lists for a name are replaced too.
        """
        changed = self
        for name in names:
            family = name.partition(".")[0]
            for each in (name, *TOGETHER.get(name, TOGETHER[family])):
                changed = changed._with_op_of(other, each)
        return changed

    def _with_op_of(self, other: Ops, name: str) -> Ops:
        """These ops, with one op or one family from `other`."""
        family, _, op = name.partition(".")
        implementations = getattr(other, family)
        if op:
            implementations = replace(getattr(self, family), **{op: getattr(implementations, op)})
        return replace(self, **{family: implementations})
