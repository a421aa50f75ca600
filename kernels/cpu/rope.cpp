// Rotary position embedding: what it means is in kernels/ops/rope.py. A head is turned as float and rounded once.
#include "convert.h"
#include "rotate.h"

namespace localllm::LANE {

void rope(const RopeArgs& args, const Worker& worker) {
  int64_t turned = 2 * args.half;
  float* head = (float*)worker.scratch(turned * sizeof(float));
  Share share = share_of(args.tokens * args.heads, worker);
  for (int64_t i = share.begin; i < share.end; i++) {
    int64_t token = i / args.heads, at = token * args.stride + i % args.heads * args.dim;
    const float *cos = args.cos + token * args.half, *sin = args.sin + token * args.half;
    if (args.type == Type::f32) {
      rotate(args.rotation, cos, sin, args.half, (float*)args.x + at);
    } else {
      widen(args.type, args.x, at, head, turned);
      rotate(args.rotation, cos, sin, args.half, head);
      narrow(args.type, head, 1.0f, args.x, at, turned);
    }
  }
}

}  // namespace localllm::LANE
