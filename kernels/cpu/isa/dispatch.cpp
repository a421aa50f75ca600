#include "dispatch.h"

#include <atomic>
#include <stdexcept>

#include "features.h"

namespace localllm {

namespace generic { extern const Variant table; }
#if defined(VARIANT_AVX2)
namespace avx2 { extern const Variant table; }
#endif
#if defined(VARIANT_AVXVNNI)
namespace avxvnni { extern const Variant table; }
#endif
#if defined(VARIANT_AVX512)
namespace avx512 { extern const Variant table; }
#endif
#if defined(VARIANT_AMX)
namespace amx { extern const Variant table; }
#endif

namespace {

// The ISA variants that this CPU and system can run, the slowest first.
std::vector<const Variant*> usable() {
  std::vector<const Variant*> variants{&generic::table};
#if defined(VARIANT_AVX2)
  if (has_avx2()) variants.push_back(&avx2::table);
#endif
#if defined(VARIANT_AVXVNNI)
  if (has_avxvnni()) variants.push_back(&avxvnni::table);
#endif
#if defined(VARIANT_AVX512)
  if (has_avx512()) variants.push_back(&avx512::table);
#endif
#if defined(VARIANT_AMX)
  if (has_amx()) variants.push_back(&amx::table);
#endif
  return variants;
}

std::atomic<const Variant*>& in_use() {
  static std::atomic<const Variant*> variant{usable().back()};
  return variant;
}

}  // namespace

const Variant& variant() { return *in_use().load(std::memory_order_relaxed); }

std::vector<std::string> usable_variants() {
  std::vector<std::string> names;
  for (const Variant* variant : usable()) names.push_back(variant->name);
  return names;
}

std::string use_variant(const std::string& name) {
  std::string names;
  for (const Variant* variant : usable()) {
    names += (names.empty() ? "" : ", ") + std::string(variant->name);
    if (name == variant->name) in_use() = variant;
  }
  if (name.empty()) in_use() = usable().back();
  else if (name != variant().name)
    throw std::runtime_error("ISA variant \"" + name + "\" is not available: this machine and build have " + names);
  return variant().name;
}

}  // namespace localllm
