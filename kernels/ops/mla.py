"""The projections of multi-head latent attention (MLA: DeepSeek-V2, 2024), in its absorbed form.

A model defines the keys and values of each head as projections of one vector per token, the latent c. The product of a
query q and a key W c is the same if the query is projected instead: q · (W c) = (Wᵀ q) · c. So the cache has only the
latent of each token. All heads read it as their key and as their value, and the projection to values follows the
attention. A query also has a rotated part. All heads share the rotated part of the key, which the cache has too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .projection import Projection
from .step import HeadStep, LayerStep

if TYPE_CHECKING:
    from . import Ops


class LatentInputs(NamedTuple):
    """The input projection: hidden -> (heads + 1) * (rotary + rank), the absorbed queries and one key. The first
    `rotary` dimensions of each head get RoPE."""

    down: Projection  # hidden -> the input of `queries`, or the queries; then the latent and the shared part of the key
    query_norm: Tensor | None  # of the input of `queries`; None if and only if `queries` is None
    queries: Projection | None  # -> heads * (plain + rotary); None: `down` has the queries
    latent_norm: Tensor  # [rank]
    keys: Tensor  # [heads, plain, rank]: the projection from the latent to the plain part of the keys
    rotary: int
    eps: float

    @property
    def product(self) -> None:
        return None

    def __call__(
        self, x: Tensor, ops: Ops, step: LayerStep | HeadStep | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        heads, plain, rank = self.keys.shape
        down = self.down(x, ops, step)
        query, latent, shared = down.split((down.shape[1] - rank - self.rotary, rank, self.rotary), dim=1)
        if self.queries is not None:
            query = ops.norm.rms(query.contiguous(), self.query_norm, self.eps, 0.0)
            query = self.queries(query, ops, step)
        unrotated, rotated = query.unflatten(1, (heads, -1)).split((plain, self.rotary), dim=2)
        absorbed = (unrotated.transpose(0, 1) @ self.keys).transpose(0, 1)
        latent = ops.norm.rms(latent.contiguous(), self.latent_norm, self.eps, 0.0)
        key = torch.cat([shared, latent], dim=1).unsqueeze(1)
        outputs = torch.cat([torch.cat([rotated, absorbed], dim=2), key], dim=1).flatten(1)
        return outputs if dtype is None else outputs.to(dtype)


class LatentOutputs(NamedTuple):
    """The output projection: the outputs of attention in the space of the latents, heads * rank -> hidden."""

    values: Tensor  # [heads, rank, value dim]: the projection from the latent to the values
    out: Projection  # heads * value dim -> hidden

    @property
    def product(self) -> None:
        return None

    def __call__(
        self, x: Tensor, ops: Ops, step: LayerStep | HeadStep | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        latents = x.unflatten(1, self.values.shape[:2])
        values = (latents.transpose(0, 1) @ self.values).transpose(0, 1)
        # With a value dimension of 1, flatten returns a transposed view.
        return self.out(values.flatten(1).contiguous(), ops, step, dtype)
