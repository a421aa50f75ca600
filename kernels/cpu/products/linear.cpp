// Calls the product of the weight format that the arguments name.

#include "linear.h"

namespace localllm::VARIANT {

void linear(const LinearArgs& args, const Worker& worker) {
  switch (args.format) {
    case Format::f32:
    case Format::bf16:
    case Format::f16: return linear_dense(args, worker);
    case Format::int8: return linear_int8(args, worker);
    case Format::int4: return linear_int4(args, worker);
    case Format::fp8: return linear_fp8(args, worker);
    case Format::mxfp4: return linear_mxfp4(args, worker);
  }
}

size_t linear_shared(const LinearArgs& args, int workers) {
  switch (args.format) {
    case Format::f32:
    case Format::bf16:
    case Format::f16: return linear_dense_shared(args, workers);
    case Format::int8: return linear_int8_shared(args, workers);
    case Format::int4: return linear_int4_shared(args, workers);
    case Format::fp8: return linear_fp8_shared(args, workers);
    case Format::mxfp4: return linear_mxfp4_shared(args, workers);
  }
  return 0;
}

void pack(const PackArgs& args, const Worker& worker) {
  switch (args.format) {
    case Format::f32:
    case Format::bf16:
    case Format::f16: return pack_dense(args, worker);
    case Format::int8: return pack_int8(args, worker);
    case Format::int4: return pack_int4(args, worker);
    case Format::fp8: return pack_fp8(args, worker);
    case Format::mxfp4: return pack_mxfp4(args, worker);
  }
}

}  // namespace localllm::VARIANT
