// Runs the tile kernels on a team of new threads, for tests. The AVX-512 kernels that they call are replaced by stubs
// that count the calls.
#include <atomic>
#include <barrier>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#if !defined(TILES_EMULATED)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"
#include "moe/plan.h"

namespace localllm {

struct Free {
  void operator()(void* memory) const { free(memory); }
};

class Team {
 public:
  explicit Team(int count) : gate(count), scratch(count) {}
  std::barrier<> gate;
  std::vector<std::unique_ptr<void, Free>> scratch;

  template <class Kernel, class Args>
  static void run(Kernel kernel, const Args& args, int count) {
    Team team(count);
    std::vector<std::thread> threads;
    for (int i = 0; i < count; i++) threads.emplace_back([&, i] { kernel(args, Worker{i, count, &team}); });
    for (std::thread& thread : threads) thread.join();
  }
};

static void* garbage(size_t bytes) {  // filled with 0xff, so that kernels that expect zeros fail
  void* memory = aligned_alloc(64, round_up(bytes + 1, 64));
  memset(memory, 0xff, bytes);
  return memory;
}

void Worker::barrier() const { team->gate.arrive_and_wait(); }
void* Worker::scratch(size_t bytes) const {
  team->scratch[index].reset(garbage(bytes));
  return team->scratch[index].get();
}

Chunks::Chunks(long total, const Worker& worker) : worker_(worker), total_(total) {}
bool Chunks::next() {  // the share of the worker as one chunk
  if (exhausted_++) return false;
  Share share = share_of(total_, worker_);
  begin = share.begin;
  end = share.end;
  return begin < end;
}

static std::atomic<int> delegations;

namespace avx512 {
void linear(const LinearArgs&, const Worker&) { delegations++; }
size_t linear_shared(const LinearArgs&, int) { return 0; }
void experts(const ExpertsArgs&, const Worker&) { delegations++; }
size_t experts_shared(const ExpertsArgs&) { return 0; }

void attention(const AttentionArgs& args, const Worker& worker) {  // writes 7 to all outputs of its tokens
  uint16_t* out = (uint16_t*)args.out;
  int64_t width = args.heads * args.value_dim, end = args.row_starts[args.rows] * width;
  for (int64_t i = args.row_starts[0] * width; worker.index == 0 && i < end; i++) out[i] = 0x40e0;
}
size_t attention_shared(const AttentionArgs&, int) { return 0; }
}  // namespace avx512

namespace amx {
void linear(const LinearArgs& args, const Worker& worker);
size_t linear_shared(const LinearArgs& args, int workers);
void experts(const ExpertsArgs& args, const Worker& worker);
size_t experts_shared(const ExpertsArgs& args);
void attention(const AttentionArgs& args, const Worker& worker);
size_t attention_shared(const AttentionArgs& args, int workers);
}  // namespace amx

}  // namespace localllm

using namespace localllm;

extern "C" {

// Returns false if the system does not permit this process to use tile registers.
__attribute__((visibility("default"))) bool open_tiles() {
#if defined(TILES_EMULATED)
  return true;
#else
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#endif
}

// Returns the number of threads that called the AVX-512 product.
__attribute__((visibility("default"))) int run_linear(void* out, const void* x, const void* weight, const float* bias,
                                                      int out_type, int x_type, int format, int64_t rows,
                                                      int64_t out_features, int64_t in_features, int64_t group,
                                                      int64_t x_stride, int64_t out_stride, bool wide, int workers) {
  LinearArgs args{out,          x,           weight, bias,     Type(out_type), Type(x_type), Format(format), rows,
                  out_features, in_features, group,  x_stride, out_stride,     wide,         nullptr};
  std::unique_ptr<void, Free> shared(garbage(amx::linear_shared(args, workers)));
  args.shared = shared.get();
  delegations = 0;
  Team::run(amx::linear, args, workers);
  return delegations;
}

// Returns the number of threads that called the AVX-512 experts.
__attribute__((visibility("default"))) int run_experts(void* out, const void* x, int type, const int32_t* chosen,
                                                       const float* weights, const void* gate_up, const void* down,
                                                       const float* gate_up_bias, const float* down_bias, int format,
                                                       bool wide, int gate, int64_t tokens, int64_t top_k,
                                                       int64_t experts, int64_t hidden, int64_t inner, int64_t x_stride,
                                                       int64_t gate_up_group, int64_t down_group, int workers) {
  int64_t rows = tokens * top_k;
  std::unique_ptr<void, Free> plan(garbage(plan_bytes(rows, experts))), gated(garbage(rows * inner * 4));
  std::unique_ptr<void, Free> results(garbage(rows * hidden * 4));
  ExpertsArgs args{};
  args.out = out, args.x = x, args.type = Type(type), args.weights = weights;
  args.plan = plan_experts(chosen, tokens, top_k, experts, plan.get());
  args.gate_up = gate_up, args.down = down, args.gate_up_bias = gate_up_bias, args.down_bias = down_bias;
  args.format = Format(format), args.wide = wide, args.gate = ExpertGate(gate);
  args.tokens = tokens, args.top_k = top_k, args.hidden = hidden, args.inner = inner, args.x_stride = x_stride;
  args.gate_up_group = gate_up_group, args.down_group = down_group;
  args.gated = gated.get(), args.results = (float*)results.get();
  std::unique_ptr<void, Free> shared(garbage(amx::experts_shared(args)));
  args.shared = shared.get();
  delegations = 0;
  Team::run(amx::experts, args, workers);
  return delegations;
}

__attribute__((visibility("default"))) void run_attention(
    void* out, const void* query, const void* key_pages, const void* value_pages, const int32_t* row_starts,
    const int32_t* context_lens, const int32_t* page_table, const float* sinks, int64_t rows, int64_t tokens,
    int64_t heads, int64_t kv_heads, int64_t dim, int64_t value_dim, int64_t query_stride, int64_t page_size,
    int64_t pages_per_row, int64_t window, float scale, float soft_cap, int workers) {
  AttentionArgs args{};
  args.out = out, args.query = query, args.key_pages = key_pages, args.value_pages = value_pages;
  args.row_starts = row_starts, args.context_lens = context_lens, args.page_table = page_table, args.sinks = sinks;
  args.type = args.cache_type = Type::bf16;
  args.rows = rows, args.tokens = tokens, args.heads = heads, args.kv_heads = kv_heads;
  args.dim = dim, args.value_dim = value_dim, args.query_stride = query_stride, args.page_size = page_size, args.pages_per_row = pages_per_row;
  args.scale = scale, args.soft_cap = soft_cap, args.window = window;
  std::unique_ptr<void, Free> shared(garbage(amx::attention_shared(args, workers)));
  args.shared = shared.get();
  Team::run(amx::attention, args, workers);
}
}
