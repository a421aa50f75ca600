#include "dispatch.h"

#include <atomic>
#include <stdexcept>

#include "cpu_features.h"

namespace localllm {

namespace generic { extern const Lane table; }
#if defined(LANE_AVX2)
namespace avx2 { extern const Lane table; }
#endif
#if defined(LANE_AVXVNNI)
namespace avxvnni { extern const Lane table; }
#endif
#if defined(LANE_AVX512)
namespace avx512 { extern const Lane table; }
#endif
#if defined(LANE_AMX)
namespace amx { extern const Lane table; }
#endif

namespace {

// The ISA variants that this CPU and system can run, the slowest first.
std::vector<const Lane*> usable() {
  std::vector<const Lane*> lanes{&generic::table};
#if defined(LANE_AVX2)
  if (has_avx2()) lanes.push_back(&avx2::table);
#endif
#if defined(LANE_AVXVNNI)
  if (has_avxvnni()) lanes.push_back(&avxvnni::table);
#endif
#if defined(LANE_AVX512)
  if (has_avx512()) lanes.push_back(&avx512::table);
#endif
#if defined(LANE_AMX)
  if (has_amx()) lanes.push_back(&amx::table);
#endif
  return lanes;
}

std::atomic<const Lane*>& in_use() {
  static std::atomic<const Lane*> lane{usable().back()};
  return lane;
}

}  // namespace

const Lane& lane() { return *in_use().load(std::memory_order_relaxed); }

std::vector<std::string> usable_lanes() {
  std::vector<std::string> names;
  for (const Lane* lane : usable()) names.push_back(lane->name);
  return names;
}

std::string use_lane(const std::string& name) {
  std::string names;
  for (const Lane* lane : usable()) {
    names += (names.empty() ? "" : ", ") + std::string(lane->name);
    if (name == lane->name) in_use() = lane;
  }
  if (name.empty()) in_use() = usable().back();
  else if (name != lane().name)
    throw std::runtime_error("CPU lane \"" + name + "\" is not available: this machine and this build have " + names);
  return lane().name;
}

}  // namespace localllm
