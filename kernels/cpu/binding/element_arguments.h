// Checks the arguments of the elementwise ops, embeddings and cache writes, and converts them to kernel arguments. Used
// for the CPU and for CUDA devices. A failed check throws std::runtime_error.
#pragma once

#include "arguments.h"

namespace localllm {

// x and out [rows, dim] or [rows, heads, dim]; weight [dim]; residual [rows, dim] (input and output) or null
NormArgs norm_arguments(const Op& op, const Tensor& out, const Tensor& x, const Tensor& weight, double eps,
                        double offset, const Tensor* residual);

// out [rows, dim], x [rows, 2 dim]
ActivationArgs gate_arguments(const Op& op, const Tensor& out, const Tensor& x, int64_t kind);

// x [tokens, heads, dim], cos and sin [tokens, half]
RopeArgs rope_arguments(const Op& op, const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t rotation);

// key and value [tokens, kv heads, dim], slots [tokens]
StoreArgs store_arguments(const Op& op, const Tensor& key, const Tensor& value, const Tensor& key_pages,
                          const Tensor& value_pages, const Tensor& slots);

// qkv [tokens, heads + 2 kv heads, dim] (written), norms [dim] or null, cos and sin [tokens, half], slots [tokens]
AppendArgs append_arguments(const Op& op, const Tensor& qkv, const Tensor* query_norm, const Tensor* key_norm,
                            double eps, double offset, const Tensor& cos, const Tensor& sin, int64_t rotation,
                            const Tensor& slots, const Tensor& key_pages, const Tensor& value_pages);

// out [tokens, dim], tokens [tokens], weight [vocab, dim]
EmbeddingArgs embedding_arguments(const Op& op, const Tensor& out, const Tensor& tokens, const Tensor& weight,
                                  double scale);

// pages [pages, ...], sources and targets [copies]; the caller sets `shared`
CopyPagesArgs copy_pages_arguments(const Op& op, const Tensor& pages, const Tensor& sources, const Tensor& targets);

}  // namespace localllm
