#include "counters.h"

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace localllm::cuda {
namespace {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(std::string("counters of a stream: ") + cudaGetErrorString(error));
}

// While it lives, this thread may allocate device memory during a stream capture.
class Relaxed {
 public:
  Relaxed() { check(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Allocates zeros, also during a capture. The memset runs on the legacy stream, which the capture does not record. A
// separate stream for the memset would make all later graphs slower: on an H200, each kernel of a graph then starts 0.5
// us later.
int32_t* zeros(size_t bytes) {
  Relaxed relaxed;
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes));
  check(cudaMemsetAsync(memory, 0, bytes, cudaStreamLegacy));
  check(cudaStreamSynchronize(cudaStreamLegacy));
  return static_cast<int32_t*>(memory);
}

}  // namespace

Counters counters_of(cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<std::pair<int, cudaStream_t>, int32_t*> allocated;  // never freed
  int device = 0;
  check(cudaGetDevice(&device));
  std::lock_guard lock(mutex);
  int32_t*& memory = allocated[{device, stream}];
  if (!memory) memory = zeros((MAX_PAIRS + CLAIMS) * sizeof(int32_t));
  return {memory, memory + MAX_PAIRS};
}

}  // namespace localllm::cuda
