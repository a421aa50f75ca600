// The GPUs that this library has code for, as text in the file; kernels/gpu/architectures.py reads it.
namespace localllm::cuda {

__attribute__((used)) static const char architectures[] = "localllm CUDA architectures: " LOCALLLM_ARCHITECTURES;

}  // namespace localllm::cuda
