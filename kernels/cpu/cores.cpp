#include "cores.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <string>
#include <thread>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace localllm {
namespace {

std::string line_of(const std::string& file) {
  std::ifstream stream(file);
  std::string line;
  std::getline(stream, line);
  return line;
}

// The logical CPUs that share a physical core with this one, as the system writes them; its own number if unknown.
std::string core_of(int cpu) {
  std::string topology = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
  std::string siblings = line_of(topology + "thread_siblings_list");
  return siblings.empty() ? std::to_string(cpu) : siblings;
}

// CPUs' worth of time that this quota file of a control group grants; infinity if none.
double granted(const std::string& quota, const std::string& period) {
  try {
    double each = std::stod(period);
    double time = std::stod(quota);  // "max": not a number
    if (time > 0 && each > 0) return time / each;
  } catch (const std::exception&) {
  }
  return INFINITY;
}

// The least that this process's control group or one above it grants.
double quota() {
  double least = INFINITY;
  const std::string root = "/sys/fs/cgroup";
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (line.rfind("0::", 0) != 0) continue;  // version 2: "0::/path"
    std::string path = line.substr(3);
    for (;;) {
      std::string limit = line_of(root + path + "/cpu.max");  // "200000 100000" or "max 100000"
      size_t space = limit.find(' ');
      if (space != std::string::npos) least = std::min(least, granted(limit.substr(0, space), limit.substr(space + 1)));
      size_t slash = path.rfind('/');
      if (path.empty() || slash == std::string::npos) break;
      path = path.substr(0, slash);
    }
  }
  const std::string old = root + "/cpu/";  // version 1, as a container sees its own
  return std::min(least, granted(line_of(old + "cpu.cfs_quota_us"), line_of(old + "cpu.cfs_period_us")));
}

}  // namespace

std::vector<int> cores() {
  std::vector<int> found;
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
    std::set<std::string> seen;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
      if (CPU_ISSET(cpu, &allowed) && seen.insert(core_of(cpu)).second) found.push_back(cpu);
  }
#endif
  if (found.empty())
    for (int cpu = 0; cpu < (int)std::max(1u, std::thread::hardware_concurrency()); cpu++) found.push_back(cpu);
  return found;
}

int usable_cores() {
  int count = (int)cores().size();
  double share = quota();
  return share < count ? std::max(1, (int)std::ceil(share)) : count;
}

void pin([[maybe_unused]] int cpu) {
#if defined(__linux__)
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(cpu, &only);
  pthread_setaffinity_np(pthread_self(), sizeof only, &only);
#endif
}

}  // namespace localllm
