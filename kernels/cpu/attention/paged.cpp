// Attention over the paged cache (defined in kernels/ops/attention.py). Attention over latents is attention with one kv
// head and values that are parts of the keys; prefill() computes all its rows.
//
// 1. Rows of one token: workers take keys until none are left (Chunks in team/worker.h).
// 2. Blocks of longer rows: workers take items from a shared list, the most expensive first, so that all workers finish
//    at about the same time.
// 3. Rows with several chunks: their partial results are merged.
#include "decode.h"
#include "prefill.h"

namespace localllm::VARIANT {
namespace {

// A row that prefill() computes. Jobs are in shared memory.
struct Job {
  Row row;
  int64_t items, cost;  // number of (chunk, block, kv head) items; cost of the most expensive item
  int64_t partials;     // offset of the row's partial results, in floats
};

struct Shared {
  int64_t* next_item;  // atomic counter: the next item that a worker takes
  Job* jobs;
  float* partials;
};

Shared shared_of(const AttentionArgs& args) {
  char* memory = (char*)args.shared;
  return {(int64_t*)memory, (Job*)(memory + 64), (float*)(memory + round_up(64 + args.rows * sizeof(Job), 64))};
}

int64_t items_of(const AttentionArgs& args, const Row& row) { return row.chunks * row.blocks * args.kv_heads; }

// Writes a job for every row that prefill() computes, the most expensive first. Returns the number of jobs.
int64_t plan_jobs(const AttentionArgs& args, Job* jobs) {
  int64_t count = 0, partials = 0;
  for (int64_t index = 0; index < args.rows; index++) {
    Row row = row_of(args, index);
    if (row.tokens > 0 && !row.decodes) {
      int64_t cost = row.chunk_keys * min_of(row.tokens, row.block_tokens), position = count++;
      for (; position > 0 && jobs[position - 1].cost < cost; position--) jobs[position] = jobs[position - 1];
      jobs[position] = {row, items_of(args, row), cost, partials};
    }
    partials += partial_floats(args, row);
  }
  return count;
}

constexpr int64_t UNIT = 64;  // keys × kv heads: workers take decode work in multiples of it

// Computes kv heads and chunks of all decode rows. The work is a range of keys × kv heads; this call computes the chunks
// whose middle is in [begin, end).
template <class E, class C>
void decode_range(const AttentionArgs& args, int64_t begin, int64_t end, float* partials, const Worker& worker) {
  int64_t offset = 0;
  for (int64_t index = 0; index < args.rows && offset < end; index++) {
    Row row = row_of(args, index);
    for (int64_t chunk = 0; row.decodes && chunk < row.chunks; chunk++) {
      Keys keys = keys_of(row, chunk);
      int64_t size = keys.end - keys.begin, first = args.kv_heads, last = 0;
      for (int64_t head = 0; head < args.kv_heads; head++) {
        int64_t middle = offset + head * size + size / 2;
        if (begin <= middle && middle < end) {
          first = min_of(first, head);
          last = head + 1;
        }
      }
      if (first < last) decode<E, C>(args, row, chunk, first, last, partials, worker);
      offset += size * args.kv_heads;
    }
    partials += partial_floats(args, row);
  }
}

template <class E, class C>
void decode_rows(const AttentionArgs& args, float* partials, const Worker& worker) {
  int64_t total = 0;  // keys × kv heads of all rows
  for (int64_t index = 0; index < args.rows; index++) {
    Row row = row_of(args, index);
    if (row.decodes) total += (row.context - row.first) * args.kv_heads;
  }
  for (Chunks chunks((total + UNIT - 1) / UNIT, worker); chunks.next();) {
    decode_range<E, C>(args, chunks.begin * UNIT, chunks.end * UNIT, partials, worker);
  }
}

template <class E, class C>
void prefill_rows(const AttentionArgs& args, const Shared& shared, int64_t jobs, const Worker& worker) {
  int64_t before = 0;  // number of items of the jobs before `job`
  const Job* job = shared.jobs;
  for (;;) {
    int64_t item = __atomic_fetch_add(shared.next_item, 1, __ATOMIC_RELAXED);
    for (; job < shared.jobs + jobs && item - before >= job->items; job++) before += job->items;
    if (job == shared.jobs + jobs) return;
    item -= before;
    int64_t kv_head = item % args.kv_heads, rest = item / args.kv_heads;
    int64_t block = job->row.blocks - 1 - rest / job->row.chunks;  // the last block attends to the most keys
    prefill<E, C>(args, job->row, rest % job->row.chunks, block, kv_head, shared.partials + job->partials, worker);
  }
}

template <class E, class C>
void all_rows(const AttentionArgs& args, const Worker& worker) {
  Shared shared = shared_of(args);
  int64_t jobs = 0;
  bool needs_merge = false;
  for (int64_t index = 0; index < args.rows; index++) {
    Row row = row_of(args, index);
    jobs += row.tokens > 0 && !row.decodes;
    needs_merge |= row.chunks > 1;
  }
  if (jobs) {
    if (worker.index == 0) {
      *shared.next_item = 0;
      plan_jobs(args, shared.jobs);
    }
    worker.barrier();
  }
  decode_rows<E, C>(args, shared.partials, worker);
  if (jobs) prefill_rows<E, C>(args, shared, jobs, worker);
  if (!needs_merge) return;
  worker.barrier();
  float* partials = shared.partials;
  for (int64_t index = 0; index < args.rows; index++) {
    Row row = row_of(args, index);
    if (row.chunks > 1) {
      Share share = share_of(row.tokens * args.heads, worker);
      float* sums = (float*)worker.scratch(args.value_dim * sizeof(float));
      for (int64_t i = share.begin; i < share.end; i++) {
        merge(args, row, i / args.heads, i % args.heads, partials, sums);
      }
    }
    partials += partial_floats(args, row);
  }
}

}  // namespace

size_t attention_shared(const AttentionArgs& args, int) {
  int64_t partials = 0;
  for (int64_t index = 0; index < args.rows; index++) partials += partial_floats(args, row_of(args, index));
  return round_up(64 + args.rows * sizeof(Job), 64) + partials * sizeof(float);
}

void attention(const AttentionArgs& args, const Worker& worker) {
#if defined(__AVX512BF16__)
  if (args.type == Type::bf16 && args.cache_type == Type::bf16) return all_rows<bf16, bf16>(args, worker);
#endif
  switch (args.cache_type) {
    case Type::f32: return all_rows<float, float>(args, worker);
    case Type::bf16: return all_rows<float, bf16>(args, worker);
    case Type::f16: return all_rows<float, f16>(args, worker);
  }
}

}  // namespace localllm::VARIANT
