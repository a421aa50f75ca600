// The entry point of the loops of bound.h, for benchmarks. A C function and not an op, because it takes a pointer.
#include <vector>

#include "../isa/dispatch.h"
#include "../team/team.h"

// Runs the loop `kind` (a Bound) on the ISA variant in use. Returns the sum of all workers' counts, in bytes or
// operations; 0 if the variant lacks the instruction. Reads only multiples of 512 bytes of `data`.
extern "C" __attribute__((visibility("default"))) double localllm_bound(int kind, const void* data, int64_t bytes,
                                                                          int64_t repeats) {
  using namespace localllm;
  Run run(INT64_MAX);
  std::vector<double> counts(run.workers());
  run.all(variant().bound, BoundArgs{(Bound)kind, data, bytes, repeats, counts.data()});
  double sum = 0;
  for (double count : counts) sum += count;
  return sum;
}
