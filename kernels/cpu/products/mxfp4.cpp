// Products with MXFP4 weights and float activations.

#include "linear.h"
#include "mxfp4_weights.h"

namespace localllm::VARIANT {

size_t linear_mxfp4_shared(const LinearArgs& args, int) { return expanded_shared<Mxfp4>(args); }

void linear_mxfp4(const LinearArgs& args, const Worker& worker) { expanded_product<Mxfp4>(args, worker); }

void pack_mxfp4(const PackArgs& args, const Worker& worker) {
  int64_t groups = args.in_features / 32;
  Share share = share_of(round_up(args.out_features, PANEL) / PANEL, worker);
  for (int64_t panel = share.begin; panel < share.end; panel++) {
    uint8_t* to = (uint8_t*)args.packed + panel * groups * MXFP4_BLOCK_BYTES;
    memset(to, 0, groups * MXFP4_BLOCK_BYTES);
    for (int64_t j = 0; j < PANEL && panel * PANEL + j < args.out_features; j++) {
      int64_t out = panel * PANEL + j;
      const uint8_t* from = (const uint8_t*)args.data + out * groups * 16;
      for (int64_t g = 0; g < groups; g++, from += 16) {
        uint8_t* block = to + g * MXFP4_BLOCK_BYTES;
        block[j] = ((const uint8_t*)args.scales)[out * groups + g];
        for (int64_t i = 0; i < 32; i++) {
          uint8_t number = from[i / 2] >> 4 * (i % 2) & 15;
          block[PANEL + i / 4 * 64 + j % 16 * 4 + i % 4] |= number << (j < 16 ? 0 : 4);
        }
      }
    }
  }
}

}  // namespace localllm::VARIANT
