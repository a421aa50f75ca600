// The experts of all weight formats in one ISA variant. The caller has checked the arguments.
//
// A `_shared` function returns the bytes of shared memory that the experts need for the same arguments.
#pragma once

#include "../kernels.h"

namespace localllm::VARIANT {

void experts_dense(const ExpertsArgs& args, const Worker& worker);  // weights in f32, bf16 or f16
size_t experts_dense_shared(const ExpertsArgs& args);
void experts_int8(const ExpertsArgs& args, const Worker& worker);
size_t experts_int8_shared(const ExpertsArgs& args);
void experts_int4(const ExpertsArgs& args, const Worker& worker);
size_t experts_int4_shared(const ExpertsArgs& args);
void experts_fp8(const ExpertsArgs& args, const Worker& worker);
size_t experts_fp8_shared(const ExpertsArgs& args);
void experts_mxfp4(const ExpertsArgs& args, const Worker& worker);
size_t experts_mxfp4_shared(const ExpertsArgs& args);

}  // namespace localllm::VARIANT
