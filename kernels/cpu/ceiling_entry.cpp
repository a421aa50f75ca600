// The entry point of the hardware-limit loops, for benchmarks. A C function and not an op, because it has no result.
#include <vector>

#include "dispatch.h"
#include "team.h"

// Runs the loop `kind` (a Ceiling) on the ISA variant in use. Returns the sum of all workers' counts, in bytes or
// operations; 0 if the variant lacks the instruction. Reads only multiples of 512 bytes of `data`.
extern "C" __attribute__((visibility("default"))) double localllm_ceiling(int kind, const void* data, int64_t bytes,
                                                                          int64_t repeats) {
  using namespace localllm;
  Run run(INT64_MAX);
  std::vector<double> counts(run.workers());
  run.all(lane().ceiling, CeilingArgs{(Ceiling)kind, data, bytes, repeats, counts.data()});
  double sum = 0;
  for (double count : counts) sum += count;
  return sum;
}
