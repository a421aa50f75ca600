#include "dispatch.h"

#include <atomic>
#include <stdexcept>

#include "features.h"

namespace localllm {

// EACH_ISA: ISA(name) for each ISA variant of the library, the slowest first.
#define ISA(name) namespace name { extern const Variant table; }
EACH_ISA
#undef ISA

namespace {

struct Compiled {
  const Variant* variant;
  bool (*runs_here)();
};

#define ISA(name) {&name::table, has_##name},
const Compiled COMPILED[] = {EACH_ISA};
#undef ISA
#define ISA(name) " " #name
__attribute__((used)) static const char MARKER[] = "ISA variants:" EACH_ISA;  // kernels/compiled/library.py reads it
#undef ISA

// The ISA variants that this CPU and system can run, the slowest first. At least one, or std::runtime_error.
std::vector<const Variant*> usable() {
  std::vector<const Variant*> variants;
  std::string names;
  for (const auto& [variant, runs_here] : COMPILED) {
    if (runs_here()) variants.push_back(variant);
    names += (names.empty() ? "" : ", ") + std::string(variant->name);
  }
  if (variants.empty())
    throw std::runtime_error("they are compiled for other processors (" + names + "): run make build");
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
