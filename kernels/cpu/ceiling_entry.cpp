// The ceilings for whoever measures: a plain C function of the library, no op, as it computes nothing.
#include <vector>

#include "dispatch.h"
#include "team.h"

// Runs one of Ceiling on the lane in use and returns what all workers have counted: bytes, or operations; 0 where the
// lane has no such instruction. `data` is read to its last whole 512 bytes.
extern "C" __attribute__((visibility("default"))) double localllm_ceiling(int kind, const void* data, int64_t bytes,
                                                                          int64_t turns) {
  using namespace localllm;
  Run run(INT64_MAX);
  std::vector<double> done(run.workers());
  run.all(lane().ceiling, CeilingArgs{(Ceiling)kind, data, bytes, turns, done.data()});
  double sum = 0;
  for (double each : done) sum += each;
  return sum;
}
