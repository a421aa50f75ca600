// Rotary position embedding (defined in kernels/ops/rope.py). Rotates each head in float and rounds once.
#include "../vectors/convert.h"
#include "rotate.h"

namespace localllm::VARIANT {

void rope(const RopeArgs& args, const Worker& worker) {
  int64_t rotated = 2 * args.half;
  float* head = (float*)worker.scratch(rotated * sizeof(float));
  Share share = share_of(args.tokens * args.heads, worker);
  for (int64_t i = share.begin; i < share.end; i++) {
    int64_t token = i / args.heads, offset = token * args.stride + i % args.heads * args.dim;
    const float *cos = args.cos + token * args.half, *sin = args.sin + token * args.half;
    if (args.type == Type::f32) {
      rotate(args.rotation, cos, sin, args.half, (float*)args.x + offset);
    } else {
      widen(args.type, args.x, offset, head, rotated);
      rotate(args.rotation, cos, sin, args.half, head);
      narrow(args.type, head, 1.0f, args.x, offset, rotated);
    }
  }
}

}  // namespace localllm::VARIANT
