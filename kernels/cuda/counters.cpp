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

// Allocates zeros. A separate stream runs the memset and is synchronised: a stream in capture would only record it.
int32_t* zeros(size_t bytes) {
  Relaxed relaxed;
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes));
  cudaStream_t side_stream = nullptr;
  check(cudaStreamCreateWithFlags(&side_stream, cudaStreamNonBlocking));
  check(cudaMemsetAsync(memory, 0, bytes, side_stream));
  check(cudaStreamSynchronize(side_stream));
  check(cudaStreamDestroy(side_stream));
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
