// The products of all weight formats in one ISA variant. The caller has checked the arguments.
//
// A `_shared` function returns the bytes of shared memory that the product needs for the same arguments and workers.
#pragma once

#include "../kernels.h"

namespace localllm::VARIANT {

void linear(const LinearArgs& args, const Worker& worker);
size_t linear_shared(const LinearArgs& args, int workers);
void pack(const PackArgs& args, const Worker& worker);

void linear_dense(const LinearArgs& args, const Worker& worker);  // weights in f32, bf16 or f16
size_t linear_dense_shared(const LinearArgs& args, int workers);
void pack_dense(const PackArgs& args, const Worker& worker);

void linear_int8(const LinearArgs& args, const Worker& worker);
size_t linear_int8_shared(const LinearArgs& args, int workers);
void pack_int8(const PackArgs& args, const Worker& worker);

void linear_int4(const LinearArgs& args, const Worker& worker);
size_t linear_int4_shared(const LinearArgs& args, int workers);
void pack_int4(const PackArgs& args, const Worker& worker);

void linear_fp8(const LinearArgs& args, const Worker& worker);
size_t linear_fp8_shared(const LinearArgs& args, int workers);
void pack_fp8(const PackArgs& args, const Worker& worker);

void linear_mxfp4(const LinearArgs& args, const Worker& worker);
size_t linear_mxfp4_shared(const LinearArgs& args, int workers);
void pack_mxfp4(const PackArgs& args, const Worker& worker);

}  // namespace localllm::VARIANT
