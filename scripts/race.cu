// A deliberate race: one warp reads shared memory that another warp writes, without a barrier between them.
// scripts/sanitize_cuda runs this program to check that racecheck reports the race.
#include <cuda_runtime.h>

namespace localllm {
__global__ void race(int* out) {
  __shared__ int numbers[64];
  numbers[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = numbers[63 - threadIdx.x];
}
}  // namespace localllm

int main() {
  int* out = nullptr;
  if (cudaMalloc(&out, 64 * sizeof(int)) != cudaSuccess) return 2;
  localllm::race<<<1, 64>>>(out);
  return cudaDeviceSynchronize() == cudaSuccess ? 0 : 2;
}
