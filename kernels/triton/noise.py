"""What the kernels of sampling share: logits as integers in their order, and the noise of a draw."""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B9)
LAST = tl.constexpr(0x7FFFFFFF)  # above every key and every token id


@triton.jit
def key_of(x):
    """Integers in the order of float32 x; NaN are the largest, and both zeros are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & LAST), LAST)


@triton.jit
def mix(h):
    """murmur3's finaliser of uint32."""
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def draw_key(seed_low, seed_high, position):
    """One uint32 of a row's seed halves and position, all int32."""
    key = mix(seed_low.to(tl.uint32, bitcast=True) + GOLDEN)
    key = mix((key ^ seed_high.to(tl.uint32, bitcast=True)) + GOLDEN)
    return mix((key ^ position.to(tl.uint32, bitcast=True)) + GOLDEN)


@triton.jit
def exponential(key, ids):
    """A number of each token (int32) of which the negative logarithm is its Gumbel noise (engine/sampling.py): the
    largest of value + noise is where this times exp(-value) is smallest, which takes one logarithm less."""
    return -tl.log(((_noise(key, ids) >> 8) | 1).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0))


@triton.jit
def least_exponential(key, ids):
    """What `exponential` is at least, and nearly is where it is small: 1 - u of its u, as -log(u) >= 1 - u. Exact: the
    u are the odd multiples of 2^-24, which lie in the middle between the numbers of 23 bits."""
    below_two = ((_noise(key, ids) >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    return (2.0 - below_two) - 1.0 / 16777216.0


@triton.jit
def _noise(key, ids):
    return mix((key ^ ids.to(tl.uint32, bitcast=True)) + GOLDEN)
