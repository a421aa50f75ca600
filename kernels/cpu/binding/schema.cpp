// The schemas of the ops for all devices. kernels/ops defines each op. Callers pass the output tensors, so that they
// can reuse memory. The mark (a!) says that the op writes the argument.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(localllm, library) {
  for (const char* schema : {
           "rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps, float offset) -> ()",
           "add_rms_norm(Tensor(a!) out, Tensor x, Tensor(b!) residual, Tensor weight, float eps, float offset) -> ()",
           "gate(Tensor(a!) out, Tensor x, int kind) -> ()",
           "rope(Tensor(a!) x, Tensor cos, Tensor sin, int rotation) -> ()",
           "store(Tensor key, Tensor value, Tensor(a!) key_pages, Tensor(b!) value_pages, Tensor slots) -> ()",
           "copy_pages(Tensor(a!) pages, Tensor sources, Tensor targets) -> ()",
           "append(Tensor(a!) qkv, Tensor? query_norm, Tensor? key_norm, float eps, float offset, Tensor cos, "
           "Tensor sin, int rotation, Tensor slots, Tensor(b!) key_pages, Tensor(c!) value_pages) -> ()",
           "attention(Tensor(a!) out, Tensor query, Tensor key_pages, Tensor value_pages, Tensor row_starts, "
           "Tensor context_lens, Tensor page_table, Tensor? sinks, float scale, int window, float soft_cap) -> ()",
           "latent_attention(Tensor(a!) out, Tensor query, Tensor pages, Tensor row_starts, Tensor context_lens, "
           "Tensor page_table, float scale, int start) -> ()",
           "pack(Tensor(a!) packed, Tensor data, Tensor? scales, Tensor? zeros, int format, int group) -> ()",
           "linear(Tensor(a!) out, Tensor x, Tensor packed, Tensor? bias, int format, int in_features, int group, "
           "bool wide) -> ()",
           "route(Tensor(a!) experts, Tensor(b!) weights, Tensor logits, Tensor? correction, int score, "
           "bool renormalise, float scale, int groups, int top_groups, bool top2) -> ()",
           "experts(Tensor(a!) out, Tensor x, Tensor chosen, Tensor weights, Tensor gate_up, Tensor down, "
           "Tensor? gate_up_bias, Tensor? down_bias, int format, int gate_up_group, int down_group, bool wide, "
           "int experts, int inner, int gate) -> ()",
           "routed_experts(Tensor(a!) out, Tensor x, Tensor router, Tensor? router_bias, int router_format, "
           "int router_group, Tensor? correction, int score, bool renormalise, float scale, int groups, "
           "int top_groups, bool top2, int top_k, Tensor gate_up, Tensor down, Tensor? gate_up_bias, "
           "Tensor? down_bias, int format, int gate_up_group, int down_group, bool wide, int experts, int inner, "
           "int gate) -> ()",
           "embedding(Tensor(a!) out, Tensor tokens, Tensor weight, float scale) -> ()",
           "lora_add(Tensor(a!) out, Tensor x, Tensor lora_a, Tensor lora_b, int[] widths, Tensor scales, "
           "Tensor order, Tensor starts, Tensor tile_slots) -> ()",
           "lora_embedding(Tensor(a!) out, Tensor tokens, Tensor lora_a, Tensor lora_b, int[] widths, Tensor scales, "
           "Tensor order, Tensor starts, Tensor tile_slots) -> ()",
           "causal_conv(Tensor(a!) out, Tensor x, Tensor row_starts, Tensor context_lens, Tensor slots, Tensor weight, "
           "Tensor? bias, Tensor(b!) states, bool gated) -> ()",
           "gated_delta(Tensor(a!) out, Tensor qkv, Tensor a, Tensor b, Tensor row_starts, Tensor context_lens, "
           "Tensor slots, Tensor rates, Tensor dt_bias, Tensor(b!) states) -> ()",
           "ssd(Tensor(a!) out, Tensor x, Tensor dt, Tensor row_starts, Tensor context_lens, Tensor slots, "
           "Tensor rates, Tensor dt_bias, Tensor skip, float dt_min, float dt_max, Tensor(b!) states) -> ()",
           "gated_norm(Tensor(a!) out, Tensor x, Tensor gate, Tensor weight, float eps, int order) -> ()",
           "greedy(Tensor(a!) tokens, Tensor logits) -> ()",
           "draw(Tensor(a!) tokens, Tensor logits, Tensor temperature, Tensor seed_low, Tensor seed_high, "
           "Tensor position, Tensor? top_k, Tensor? top_p, Tensor? min_p) -> ()",
           "mask(Tensor(a!) logits, Tensor rows, Tensor words) -> ()",
           "logprob(Tensor(a!) out, Tensor(b!) normaliser, Tensor logits, Tensor tokens) -> ()",
           "layer(Tensor(a!) x, Tensor(b!) stream, Tensor[] norms, Tensor[] head_norms, Tensor[] weights, "
           "Tensor[] biases, int[] formats, int[] groups, bool wide, Tensor cos, Tensor sin, Tensor slots, "
           "Tensor(c!) key_pages, Tensor(d!) value_pages, Tensor row_starts, Tensor context_lens, Tensor page_table, "
           "Tensor? sinks, int heads, int inner, int gate, int rotation, int window, float eps, float offset, "
           "float scale, float soft_cap, Tensor[] lora_a, Tensor[] lora_b, int[] lora_widths, Tensor? lora_scales, "
           "Tensor? lora_order, Tensor? lora_starts, Tensor? lora_slots) -> ()",
           "layers(Tensor(a!) x, Tensor(b!) stream, Tensor[] tensors, Tensor numbers, Tensor reals, Tensor[] cos, "
           "Tensor[] sin, Tensor[] slots, Tensor(c!)[] key_pages, Tensor(d!)[] value_pages, Tensor row_starts, "
           "Tensor context_lens, Tensor[] page_tables) -> ()",
           "first_touch(Tensor(a!) fresh, int unit) -> ()",
           "variants() -> str",
           "use_variant(str name) -> str",
           "threads() -> int",
           "use_threads(int count) -> int",
           "share_from(int bytes) -> int",
           "packed_bytes(int format, int out_features, int in_features, int group) -> int",
       })
    library.def(schema);
}
