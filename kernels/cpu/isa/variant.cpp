// The kernel table of an ISA variant, compiled once per variant. The amx variant has few kernels of its own and takes
// the others from avx512.
#include "../kernels.h"

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

namespace localllm {

#if defined(__AMX_BF16__)
#define REST avx512
#else
#define REST VARIANT
#endif

namespace REST {

void rms_norm(const NormArgs&, const Worker&);
void gate(const ActivationArgs&, const Worker&);
void rope(const RopeArgs&, const Worker&);
void store(const StoreArgs&, const Worker&);
void copy_pages(const CopyPagesArgs&, const Worker&);
void append(const AppendArgs&, const Worker&);
void attention(const AttentionArgs&, const Worker&);
size_t attention_shared(const AttentionArgs&, int workers);
void pack(const PackArgs&, const Worker&);
void route(const RouteArgs&, const Worker&);
void embedding(const EmbeddingArgs&, const Worker&);
void lora_shrink(const LoraArgs&, const Worker&);
void lora_look_up(const LoraArgs&, const Worker&);
void lora_expand(const LoraArgs&, const Worker&);
void causal_conv(const ConvArgs&, const Worker&);
void scan(const ScanArgs&, const Worker&);
void gated_norm(const GatedNormArgs&, const Worker&);
void greedy(const GreedyArgs&, const Worker&);
size_t greedy_shared(const GreedyArgs&, int workers);
void draw(const DrawArgs&, const Worker&);
size_t draw_shared(const DrawArgs&, int workers);
void mask(const MaskArgs&, const Worker&);
void logprob(const LogprobArgs&, const Worker&);
size_t logprob_shared(const LogprobArgs&, int workers);

}  // namespace REST

namespace VARIANT {

void linear(const LinearArgs&, const Worker&);
size_t linear_shared(const LinearArgs&, int workers);
void experts(const ExpertsArgs&, const Worker&);
size_t experts_shared(const ExpertsArgs&);
void bound(const BoundArgs&, const Worker&);

#if defined(__AMX_BF16__)
void attention(const AttentionArgs&, const Worker&);
size_t attention_shared(const AttentionArgs&, int workers);
using namespace REST;  // the declarations above hide those of avx512
#endif

extern const Variant table;
const Variant table = {
    .name = TEXT(VARIANT),
    .rms_norm = rms_norm,
    .gate = gate,
    .rope = rope,
    .store = store,
    .copy_pages = copy_pages,
    .append = append,
    .attention = VARIANT::attention,
    .attention_shared = VARIANT::attention_shared,
    .linear = VARIANT::linear,
    .linear_shared = VARIANT::linear_shared,
    .pack = pack,
    .route = route,
    .experts = VARIANT::experts,
    .experts_shared = VARIANT::experts_shared,
    .embedding = embedding,
    .lora_shrink = lora_shrink,
    .lora_look_up = lora_look_up,
    .lora_expand = lora_expand,
    .causal_conv = causal_conv,
    .scan = scan,
    .gated_norm = gated_norm,
    .greedy = greedy,
    .greedy_shared = greedy_shared,
    .draw = draw,
    .draw_shared = draw_shared,
    .mask = mask,
    .logprob = logprob,
    .logprob_shared = logprob_shared,
    .bound = VARIANT::bound,
};

}  // namespace VARIANT
}  // namespace localllm
