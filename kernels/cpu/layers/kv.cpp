// Writes to the paged KV cache, and copies of its pages.
#include "../vectors/row.h"

namespace localllm::VARIANT {
namespace {

template <class T, class C>
void store_rows(const StoreArgs& args, const Worker& worker) {
  Share share = share_of(2 * args.tokens, worker);  // items: keys of all tokens, then their values
  for (long item = share.begin; item < share.end; item++) {
    bool is_key = item < args.tokens;
    int64_t token = is_key ? item : item - args.tokens;
    const T* from = is_key ? (const T*)args.key + token * args.key_stride
                           : (const T*)args.value + token * args.value_stride;
    C* to = (C*)(is_key ? args.key_pages : args.value_pages) + args.slots[token] * args.width;
    each_vector(0, args.width, [&](int64_t i, auto n) { store(to + i, load(from + i, n), n); });
  }
}

template <class T>
void store_as(const StoreArgs& args, const Worker& worker) {
  switch (args.cache_type) {
    case Type::f32: return store_rows<T, float>(args, worker);
    case Type::bf16: return store_rows<T, bf16>(args, worker);
    case Type::f16: return store_rows<T, f16>(args, worker);
  }
}

}  // namespace

void store(const StoreArgs& args, const Worker& worker) {
  switch (args.type) {
    case Type::f32: return store_as<float>(args, worker);
    case Type::bf16: return store_as<bf16>(args, worker);
    case Type::f16: return store_as<f16>(args, worker);
  }
}

void copy_pages(const CopyPagesArgs& args, const Worker& worker) {
  Share share = share_of(args.copies, worker);
  char* pages = (char*)args.pages;
  char* copies = (char*)args.shared;
  for (long copy = share.begin; copy < share.end; copy++)
    memcpy(copies + copy * args.page_bytes, pages + args.sources[copy] * args.page_bytes, args.page_bytes);
  worker.barrier();
  for (long copy = share.begin; copy < share.end; copy++)
    memcpy(pages + args.targets[copy] * args.page_bytes, copies + copy * args.page_bytes, args.page_bytes);
}

}  // namespace localllm::VARIANT
