// A seeded draw by Gumbel noise among the tokens that the filters leave (kernels/ops/sampling.py says what they mean).
//
// One pass where nothing filters. Otherwise a first pass keeps the largest logit of each block, and the later ones
// look only into blocks that hold something large enough.
#include "crew.h"
#include "gumbel.h"
#include "threshold.h"

namespace localllm::LANE {
namespace {

constexpr float LOWEST = -3.402823466e38f;
constexpr unsigned ALL = (1u << WIDTH) - 1;  // lanes
constexpr int64_t FEW = 64;  // blocks whose largest are looked at first for a nucleus: most are no larger than that

struct Row {
  const float* logits;
  int64_t vocab;
  float temperature;
  uint32_t key;
  int64_t top_k;  // 0: off
  float top_p;    // 1: off
  float min_p;    // 0: off
};

Row row_of(const DrawArgs& args, int64_t row) {
  int64_t top_k = args.top_k ? args.top_k[row] : 0;
  return {args.logits + row * args.stride,
          args.vocab,
          args.temperature[row],
          draw_key((uint32_t)args.seed_low[row], (uint32_t)args.seed_high[row], (uint32_t)args.position[row]),
          top_k < args.vocab ? top_k : 0,
          args.top_p ? args.top_p[row] : 1.0f,
          args.min_p ? args.min_p[row] : 0.0f};
}

// What a crew knows of a row.
struct Notes {
  float* largest;   // [blocks] logits
  float* sums;      // [blocks] of exp((logit - largest) / temperature), for a nucleus
  float* values;    // [vocab] logits / temperature of the candidates, each member's from its first block on
  float* weights;   // [vocab]
  int64_t* counts;  // [members]
  struct State {
    float cutoff;  // logits from here on are candidates
    float least;   // the answer, once
    bool done;     // is true
  }* state;
};

int64_t lines(int64_t bytes) { return round_up(bytes, 64); }

size_t notes_bytes(int64_t vocab, int members) {
  return 2 * lines(blocks_in(vocab) * 4) + 2 * lines(vocab * 4) + lines(members * 8) + lines(sizeof(Notes::State));
}

Notes notes_at(void* memory, int64_t vocab, int members) {
  char* next = (char*)memory;
  auto take = [&](int64_t bytes) {
    char* own = next;
    next += lines(bytes);
    return own;
  };
  Notes notes;
  notes.largest = (float*)take(blocks_in(vocab) * 4);
  notes.sums = (float*)take(blocks_in(vocab) * 4);
  notes.values = (float*)take(vocab * 4);
  notes.weights = (float*)take(vocab * 4);
  notes.counts = (int64_t*)take(members * 8);
  notes.state = (Notes::State*)take(sizeof(Notes::State));
  return notes;
}

void survey(const Row& row, const Crew& crew, const Notes& notes, bool weigh) {
  F32 heat = set1(row.temperature);
  Share blocks = blocks_of(row.vocab, crew);
  for (long block = blocks.begin; block < blocks.end; block++) {
    int64_t i = block * BLOCK, end = block_end(block, row.vocab);
    float most = notes.largest[block] = block_largest(row.logits, i, end);
    if (!weigh) continue;
    F32 sums = zero(), top = set1(most / row.temperature);
    for (; i + WIDTH <= end; i += WIDTH) sums = sums + exp(load(row.logits + i) / heat - top);
    float rest = 0;
    for (; i < end; i++) rest += expf(row.logits[i] / row.temperature - most / row.temperature);
    notes.sums[block] = most == -INFINITY ? 0 : sum(sums) + rest;
  }
}

// The wanted-th largest logit is not below the wanted-th largest of the blocks' largest.
float first_cutoff(const Row& row, const Notes& notes, int64_t wanted) {
  int64_t found = 0, blocks = blocks_in(row.vocab);
  for (int64_t block = 0; block < blocks; block++) {
    if (notes.largest[block] == -INFINITY) continue;
    notes.values[found] = notes.largest[block];
    notes.weights[found++] = 1;
  }
  return found < wanted ? LOWEST : least_kept(notes.values, notes.weights, found, (double)wanted);
}

void gather(const Row& row, const Crew& crew, const Notes& notes) {
  float cutoff = notes.state->cutoff;
  F32 least = set1(cutoff), heat = set1(row.temperature);
  Share blocks = blocks_of(row.vocab, crew);
  float* values = notes.values + blocks.begin * BLOCK;
  int64_t count = 0;
  for (long block = blocks.begin; block < blocks.end; block++) {
    if (notes.largest[block] < cutoff) continue;
    each_vector(block * BLOCK, block_end(block, row.vocab), [&](int64_t i, auto n) {
      F32 logits = load(row.logits + i, n);
      unsigned bits = first_bits(not_below(logits, least), n);
      if (bits == ALL) {
        store(values + count, logits / heat);
        count += WIDTH;
        return;
      }
      for (; bits; bits &= bits - 1) values[count++] = row.logits[i + __builtin_ctz(bits)] / row.temperature;
    });
  }
  notes.counts[crew.index] = count;
}

// Puts all members' candidates side by side.
int64_t join(const Row& row, const Crew& crew, const Notes& notes) {
  int64_t count = 0;
  for (int member = 0; member < crew.count; member++) {
    Share blocks = blocks_of(row.vocab, {crew.worker, member, crew.count});
    memmove(notes.values + count, notes.values + blocks.begin * BLOCK, notes.counts[member] * 4);
    count += notes.counts[member];
  }
  return count;
}

// weights = exp(values - top), and their sum.
double weigh(float* weights, const float* values, int64_t count, float top) {
  double total = 0;
  for (int64_t i = 0; i < count;) {
    int64_t end = i + BLOCK < count ? i + BLOCK : count;
    F32 sums = zero();
    for (; i + WIDTH <= end; i += WIDTH) {
      F32 weight = exp(load(values + i) - set1(top));
      store(weights + i, weight);
      sums = sums + weight;
    }
    total += sum(sums);
    for (; i < end; i++) total += weights[i] = expf(values[i] - top);
  }
  return total;
}

// One member's, from all candidates: the least value to stay, or a lower cutoff where they do not settle it.
void settle(const Row& row, const Crew& crew, const Notes& notes, float top, double mass) {
  Notes::State& state = *notes.state;
  int64_t count = join(row, crew, notes);
  state.done = true;
  if (row.top_k) {
    for (int64_t i = 0; i < count; i++) notes.weights[i] = 1;
    state.least = least_kept(notes.values, notes.weights, count, (double)row.top_k);
    if (!(row.top_p < 1)) return;
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
      if (notes.values[i] >= state.least) notes.values[kept++] = notes.values[i];
    }
    count = kept;
    mass = weigh(notes.weights, notes.values, count, top);
  } else if (weigh(notes.weights, notes.values, count, top) < row.top_p * mass && state.cutoff > LOWEST) {
    // All below this distance of the top weigh less than what the nucleus leaves out.
    float enough = (top - (float)::log((double)row.vocab / ((1.0 - row.top_p) * mass))) * row.temperature;
    state.cutoff = enough < state.cutoff ? enough : LOWEST;
    state.done = false;
    return;
  }
  state.least = least_kept(notes.values, notes.weights, count, row.top_p * mass);
}

// The least value (logit / temperature) that the filters keep. Leaves the blocks' largest in the notes, unless it is
// -infinity: nothing was looked at, or something in the row is no number, and wins whatever the filters say.
float least_of(const Row& row, const Crew& crew, const Notes& notes) {
  bool nucleus = row.top_p < 1, weighs = nucleus && !row.top_k;
  if (!row.top_k && !nucleus && !(row.min_p > 0)) return -INFINITY;
  sync(crew);  // nobody reads any more what there is of the row before
  survey(row, crew, notes, weighs);
  sync(crew);
  float most = -INFINITY;
  for (int64_t block = 0; block < blocks_in(row.vocab); block++)
    most = larger(notes.largest[block], most) ? notes.largest[block] : most;
  float top = most / row.temperature;
  if (!(top < INFINITY && top > -INFINITY)) return -INFINITY;
  float least = row.min_p > 0 ? top + logf(row.min_p) : LOWEST;
  if (!row.top_k && !nucleus) return least;
  double mass = 0;
  if (weighs) {
    for (int64_t block = 0; block < blocks_in(row.vocab); block++) {
      float sum = notes.sums[block];
      if (sum > 0) mass += sum * ::exp((double)(notes.largest[block] / row.temperature) - top);
    }
  }
  if (crew.index == 0) *notes.state = {first_cutoff(row, notes, row.top_k ? row.top_k : FEW), 0, false};
  sync(crew);
  do {
    gather(row, crew, notes);
    sync(crew);
    if (crew.index == 0) settle(row, crew, notes, top, mass);
    sync(crew);
  } while (!notes.state->done);
  return least > notes.state->least ? least : notes.state->least;
}

// The largest of value + noise among this member's tokens that are not below `least`.
Best drawn(const Row& row, const Crew& crew, float least, const float* largest) {
  float cutoff = least * row.temperature;
  cutoff -= fabsf(cutoff) * 1e-6f;  // no logit below it comes to `least` when divided, rounding included
  F32 heat = set1(row.temperature), lowest = set1(least), logit = set1(cutoff);
  Best best = {LOWEST, 0};
  Share blocks = blocks_of(row.vocab, crew);
  for (long block = blocks.begin; block < blocks.end; block++) {
    if (largest && largest[block] < cutoff) continue;
    each_vector(block * BLOCK, block_end(block, row.vocab), [&](int64_t i, auto n) {
      F32 raw = load(row.logits + i, n);
      if (!not_below(raw, logit)) return;
      F32 x = raw / heat;
      Words noise = uniform_bits(row.key, (uint32_t)i);
      unsigned bits = not_below(x + gumbel_bound(noise), set1(best.value)) & not_below(x, lowest);
      bits = first_bits(bits, n);
      if (!bits) return;
      float values[WIDTH];
      store(values, x + gumbel(noise));
      for (; bits; bits &= bits - 1) offer(best, values[__builtin_ctz(bits)], i + __builtin_ctz(bits));
    });
  }
  return best;
}

}  // namespace

size_t draw_shared(const DrawArgs& args, int workers) {
  if (!together(args.rows, workers)) return 0;
  return notes_bytes(args.vocab, workers) + (size_t)args.rows * workers * sizeof(Best);
}

void draw(const DrawArgs& args, const Worker& worker) {
  Crew crew = crew_of(args.rows, worker);
  size_t bytes = notes_bytes(args.vocab, crew.count);
  char* memory = (char*)(crew.count > 1 ? args.shared : worker.scratch(bytes));
  Notes notes = notes_at(memory, args.vocab, crew.count);
  Best* found = (Best*)(memory + bytes);
  Share rows = rows_of(args.rows, crew);
  for (long at = rows.begin; at < rows.end; at++) {
    Row row = row_of(args, at);
    Best best;
    if (row.temperature == 0) {
      best = largest_of(row.logits, row.vocab, crew);
    } else {
      float least = least_of(row, crew, notes);
      best = drawn(row, crew, least, least > -INFINITY ? notes.largest : nullptr);
    }
    if (crew.count > 1) found[at * crew.count + crew.index] = best;
    else args.tokens[at] = best.token;
  }
  if (crew.count == 1) return;
  worker.barrier();
  Share own = share_of(args.rows, worker);
  for (long row = own.begin; row < own.end; row++) args.tokens[row] = best_token(found + row * crew.count, crew.count);
}

}  // namespace localllm::LANE
