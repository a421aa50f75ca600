// Products with 8-bit float weights (e4m3) and float activations.

#include "fp8_weights.h"
#include "linear.h"

namespace localllm::VARIANT {

size_t linear_fp8_shared(const LinearArgs& args, int) { return expanded_shared<E4m3>(args); }

void linear_fp8(const LinearArgs& args, const Worker& worker) { expanded_product<E4m3>(args, worker); }

void pack_fp8(const PackArgs& args, const Worker& worker) {
  int64_t depth = padded_in_features(Format::fp8, args.in_features, args.group), group = round_up(args.group, 32);
  int64_t blocks = depth / group, block_bytes = PANEL * 4 + group * PANEL;
  Share share = share_of(round_up(args.out_features, PANEL) / PANEL, worker);
  for (int64_t panel = share.begin; panel < share.end; panel++) {
    uint8_t* to = (uint8_t*)args.packed + panel * blocks * block_bytes;
    memset(to, 0, blocks * block_bytes);
    for (int64_t j = 0; j < PANEL && panel * PANEL + j < args.out_features; j++) {
      int64_t out = panel * PANEL + j;
      const uint8_t* from = (const uint8_t*)args.data + out * args.in_features;
      for (int64_t b = 0; b < blocks; b++) {
        memcpy(to + b * block_bytes + j * 4, (const float*)args.scales + out * blocks + b, 4);
      }
      for (int64_t k = 0; k < args.in_features; k++) {
        int64_t i = k % group;
        to[k / group * block_bytes + PANEL * 4 + i / 2 * PANEL * 2 + j * 2 + i % 2] = from[k];
      }
    }
  }
}

}  // namespace localllm::VARIANT
