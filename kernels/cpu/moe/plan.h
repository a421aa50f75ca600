// Sorts the choices of all tokens by expert and divides them into segments. A counting sort; plain C++ without vectors.
#pragma once

#include <algorithm>
#include <cstring>

#include "../kernels.h"

namespace localllm {

// Maximum number of segments: each expert has at most one segment that is shorter than SEGMENT_ROWS / 2.
inline int64_t max_segments(int64_t rows, int64_t experts) {
  return std::min(experts, rows) + rows / (SEGMENT_ROWS / 2);
}

// Bytes of memory for a plan.
inline int64_t plan_bytes(int64_t rows, int64_t experts) {
  return round_up((2 * rows + experts + 1) * sizeof(int32_t), 64) + max_segments(rows, experts) * sizeof(Segment);
}

// chosen: [tokens, top_k], experts from 0 to experts - 1. The plan is in `memory`, 64-byte aligned.
inline ExpertPlan plan_experts(const int32_t* chosen, int64_t tokens, int64_t top_k, int64_t experts, void* memory) {
  int64_t rows = tokens * top_k;
  int32_t* row_tokens = (int32_t*)memory;
  int32_t* positions = row_tokens + rows;
  int32_t* ends = positions + rows;  // [experts + 1]: where the next row of the expert before goes
  Segment* segments = (Segment*)((char*)memory + round_up((2 * rows + experts + 1) * sizeof(int32_t), 64));
  std::memset(ends, 0, (experts + 1) * sizeof(int32_t));
  for (int64_t choice = 0; choice < rows; choice++) ends[chosen[choice] + 1]++;
  ExpertPlan plan{row_tokens, positions, segments, 0, rows, 0};
  int32_t begin = 0;
  for (int64_t expert = 0; expert < experts; expert++) {
    int32_t count = ends[expert + 1], parts = (int32_t)((count + SEGMENT_ROWS - 1) / SEGMENT_ROWS);
    for (int32_t part = 0; part < parts; part++) {
      int32_t first = (int32_t)((int64_t)count * part / parts), last = (int32_t)((int64_t)count * (part + 1) / parts);
      segments[plan.count++] = {(int32_t)expert, begin + first, last - first};
      plan.tiles += (last - first + 15) / 16;
    }
    ends[expert + 1] = begin;
    begin += count;
  }
  for (int64_t choice = 0; choice < rows; choice++) {
    int32_t row = ends[chosen[choice] + 1]++;
    row_tokens[row] = (int32_t)(choice / top_k);
    positions[choice] = row;
  }
  return plan;
}

}  // namespace localllm
