// Writes keys and values to the paged cache, and copies pages.
#include <type_traits>

#include "../device/vec.cuh"

namespace localllm::cuda {

namespace {

constexpr int THREADS = 256;

unsigned blocks_for(int64_t items) {
  int64_t blocks = (items + THREADS - 1) / THREADS;
  return unsigned(blocks < MAX_GRID ? blocks : MAX_GRID);
}

template <class T, class C, int N>
__global__ void put(const T* key, const T* value, C* keys, C* values, const int64_t* slots, int64_t tokens,
                    int64_t width, int64_t key_stride, int64_t value_stride, int64_t limit) {
  int64_t row_vectors = width / N, items = 2 * tokens * row_vectors;
  for (int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x; i < items; i += gridDim.x * int64_t(THREADS)) {
    bool is_value = i >= tokens * row_vectors;
    int64_t rest = is_value ? i - tokens * row_vectors : i, token = rest / row_vectors, offset = rest % row_vectors * N;
    if (slots[token] < 0 || slots[token] >= limit) continue;
    float numbers[N];
    load<N>(is_value ? value + token * value_stride + offset : key + token * key_stride + offset, numbers);
    save<N>((is_value ? values : keys) + slots[token] * width + offset, numbers);
  }
}

// Copies the pages `ids` of every cache to a dense buffer (GATHER = true), or from the buffer to the pages. A block
// copies one page at a time.
template <class T, bool GATHER>
__global__ void move(T* pages, T* buffer, const int64_t* ids, int64_t caches, int64_t copies, int64_t page_size,
                     int64_t limit) {
  for (int64_t item = blockIdx.x; item < caches * copies; item += gridDim.x) {
    int64_t id = ids[item % copies];
    if (id < 0 || id >= limit) continue;
    T* page = pages + (item / copies * limit + id) * page_size;
    T* buffered = buffer + item * page_size;
    for (int64_t i = threadIdx.x; i < page_size; i += THREADS) {
      if (GATHER) buffered[i] = page[i];
      else page[i] = buffered[i];
    }
  }
}

template <class T>
void copy(const CopyCachePagesArgs& args, cudaStream_t stream) {
  int64_t page_size = args.page_bytes / sizeof(T);
  int64_t items = args.caches * args.copies;
  unsigned blocks = unsigned(items < MAX_GRID ? items : MAX_GRID);
  auto* pages = static_cast<T*>(args.pages);
  auto* buffer = static_cast<T*>(args.shared);
  move<T, true>
      <<<blocks, THREADS, 0, stream>>>(pages, buffer, args.sources, args.caches, args.copies, page_size, args.limit);
  move<T, false>
      <<<blocks, THREADS, 0, stream>>>(pages, buffer, args.targets, args.caches, args.copies, page_size, args.limit);
}

}  // namespace

void store(const StoreArgs& args, cudaStream_t stream) {
  if (args.tokens == 0 || args.width == 0) return;
  int64_t size = size_of(args.type), cache_size = args.cache_e4m3 ? 1 : size_of(args.cache_type);
  bool vectors = aligned({args.key, args.value, args.key_pages, args.value_pages},
                         {args.width * size, args.width * cache_size, args.key_stride * size, args.value_stride * size});
  with_type(args.type, [&](auto t) {
    auto into = [&](auto c) {
      using T = decltype(t);
      using C = decltype(c);
      auto start = [&](auto count) {
        constexpr int N = decltype(count)::value;
        put<T, C, N><<<blocks_for(2 * args.tokens * (args.width / N)), THREADS, 0, stream>>>(
            static_cast<const T*>(args.key), static_cast<const T*>(args.value), static_cast<C*>(args.key_pages),
            static_cast<C*>(args.value_pages), args.slots, args.tokens, args.width, args.key_stride,
            args.value_stride, args.limit);
      };
      if (vectors)
        start(std::integral_constant<int, (WIDEST<T> < WIDEST<C> ? WIDEST<T> : WIDEST<C>)>{});
      else
        start(std::integral_constant<int, 1>{});
    };
    if (args.cache_e4m3)
      into(__nv_fp8_e4m3{});
    else
      with_type(args.cache_type, into);
  });
  check_launch("store");
}

void copy_cache_pages(const CopyCachePagesArgs& args, cudaStream_t stream) {
  if (args.bytes() == 0) return;
  if (aligned({args.pages, args.shared}, {args.page_bytes}))
    copy<int4>(args, stream);
  else
    copy<char>(args, stream);
  check_launch("copy_cache_pages");
}

}  // namespace localllm::cuda
