"""Device functions that the sampling kernels share: integer keys in the order of the logits, and the Gumbel noise."""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B9)
LAST = tl.constexpr(0x7FFFFFFF)  # the largest logit key, and larger than every token id


@triton.jit
def key_of(x):
    """int32 keys with the same order as the float32 values x; NaN has the largest key, and both zeros have one key."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & LAST), LAST)


@triton.jit
def mix(h):
    """The 32-bit finaliser of murmur3."""
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def draw_key(seed_low, seed_high, position):
    """The uint32 noise key of a row, from both halves of its seed and its position, all int32."""
    key = mix(seed_low.to(tl.uint32, bitcast=True) + GOLDEN)
    key = mix((key ^ seed_high.to(tl.uint32, bitcast=True)) + GOLDEN)
    return mix((key ^ position.to(tl.uint32, bitcast=True)) + GOLDEN)


@triton.jit
def exponential(key, ids):
    """The exponential noise of each token (int32); its negative logarithm is the Gumbel noise (engine/sampling.py).

    logit + Gumbel noise is largest where this value times exp(-logit) is smallest, which saves a logarithm.
    """
    return -tl.log(((_noise(key, ids) >> 8) | 1).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0))


@triton.jit
def min_exponential(key, ids):
    """A lower bound of `exponential`, close to it where it is small: -log(u) >= 1 - u for the same u.

    1 - u is exact: u is an odd multiple of 2^-24, which is the middle between two neighbouring multiples of 2^-23.
    """
    below_two = ((_noise(key, ids) >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    return (2.0 - below_two) - 1.0 / 16777216.0


@triton.jit
def _noise(key, ids):
    return mix((key ^ ids.to(tl.uint32, bitcast=True)) + GOLDEN)
