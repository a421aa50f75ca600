// What racecheck must see: one warp reads shared memory that another writes, with no barrier between. scripts/sanitize_cuda
// builds and runs it before it believes racecheck's silence about the kernels.
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
