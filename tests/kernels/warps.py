"""CUDA sources as C++: a thread for each thread of a block, whose warps exchange what CUDA's do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np

from .emulation import execute

# Products are summed up of the parts that PTX says each thread of a warp holds. Copies are there when waited for.
PRELUDE = """
#include <algorithm>
#include <barrier>
#include <cmath>
#include <memory>
#include <thread>
#include <utility>
#include <vector>
using std::max, std::min;
struct uint4 { uint32_t x, y, z, w; };
uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
uint4 __ldcs(const uint4* from) { return *from; }
uint4 __ldg(const uint4* from) { return *from; }
struct Place { int x, y; };
thread_local Place threadIdx, blockIdx;
Place blockDim, gridDim;
thread_local std::vector<std::vector<std::pair<uint4*, uint4>>> slots{{}};
void copy_async(uint4* to, const uint4* from) { slots.back().emplace_back(to, *from); }
void end_of_slot() { slots.emplace_back(); }
template <size_t PENDING> void await_slots() {
  for (; slots.size() > PENDING + 1; slots.erase(slots.begin()))
    for (auto [to, x] : slots.front()) *to = x;
}
std::unique_ptr<std::barrier<>> block;
void __syncthreads() { block->arrive_and_wait(); }
struct Warp {
  std::barrier<> together{32};
  uint32_t a[32][4], b[32][2];
} warps_of_block[32];
float half(uint32_t pair, int which) {
  const uint32_t wide = which ? pair & 0xffff0000 : pair << 16;
  float x;
  memcpy(&x, &wide, 4);
  return x;
}
void multiply(
    float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  Warp& warp = warps_of_block[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  const uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  memcpy(warp.a[lane], a, 16);
  memcpy(warp.b[lane], b, 8);
  warp.together.arrive_and_wait();
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      const int from = k % 8 / 2;
      const uint32_t one = warp.a[row % 8 * 4 + from][row / 8 + k / 8 * 2], other = warp.b[column * 4 + from][k / 8];
      sum[i] += half(one, k % 2) * half(other, k % 2);
    }
  }
  warp.together.arrive_and_wait();
}
float __shfl_xor_sync(uint32_t, float x, int other) {
  Warp& warp = warps_of_block[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  memcpy(warp.a[lane], &x, 4);
  warp.together.arrive_and_wait();
  memcpy(&x, warp.a[lane ^ other], 4);
  warp.together.arrive_and_wait();
  return x;
}
uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t which) {
  const uint64_t both = uint64_t(y) << 32 | x;
  uint32_t found = 0;
  for (int i = 0; i < 4; i++) found |= uint32_t(both >> (which >> i * 4 & 7) * 8 & 255) << i * 8;
  return found;
}
float __int_as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
template <class Call> void launch(int blocks, int height, int threads, Call call) {
  blockDim = {threads, 1}, gridDim = {blocks, height};
  block = std::make_unique<std::barrier<>>(threads);
  for (int at = 0; at < blocks * height; at++) {
    std::vector<std::jthread> running;
    for (int thread = 0; thread < threads; thread++)
      running.emplace_back([=] { threadIdx = {thread, 0}, blockIdx = {at % blocks, at / blocks}; call(); });
  }
}
template <class V> V* poisoned(size_t count) {
  V* data = new V[count];
  memset(data, 0xff, count * sizeof(V));
  return data;
}
template <class V> void save(const char* name, const V* data, size_t count) {
  fwrite(data, sizeof(V), count, fopen(name, "wb"));
}
using T = bfloat16;
#define __shared__ static
"""


def run(code: str, parts: Mapping[str, object], arrays: Mapping[str, mx.array], folder: Path, *flags: str) -> None:
    """Compile and run C++ behind PRELUDE in `folder`, with each {NAME} of `parts` put in; it finds the arrays by name,
    bf16 as bits."""
    for name, part in parts.items():
        code = code.replace(f"{{{name}}}", str(part))
    for name, x in arrays.items():
        np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x).tofile(folder / name)
    execute(PRELUDE + code, folder, "-std=c++20", "-fno-strict-aliasing", "-pthread", *flags)


def bf16(path: Path) -> mx.array:
    """What `save` wrote of such numbers, as float32."""
    return mx.array((np.fromfile(path, np.uint16).astype(np.uint32) << 16).view(np.float32))
