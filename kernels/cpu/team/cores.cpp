#include "cores.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <set>
#include <string>
#include <thread>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace localllm {
namespace {

std::string first_line(const std::string& file) {
  std::ifstream stream(file);
  std::string line;
  std::getline(stream, line);
  return line;
}

// The list of logical CPUs on the physical core of `cpu`, in the system's text form. If unknown, `cpu` itself.
std::string core_of(int cpu) {
  std::string topology = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
  std::string siblings = first_line(topology + "thread_siblings_list");
  return siblings.empty() ? std::to_string(cpu) : siblings;
}

// The number of CPUs that a control group's quota and period (texts, microseconds) allow; infinity without a limit.
double allowed_cpus(const std::string& quota_text, const std::string& period_text) {
  try {
    double period = std::stod(period_text);
    double quota = std::stod(quota_text);  // throws for "max"
    if (quota > 0 && period > 0) return quota / period;
  } catch (const std::exception&) {
  }
  return INFINITY;
}

// The smallest number of CPUs that this process's control group and its parents allow.
double cpu_quota() {
  double smallest = INFINITY;
  const std::string root = "/sys/fs/cgroup";
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (line.rfind("0::", 0) != 0) continue;  // the line of control groups version 2: "0::/path"
    std::string path = line.substr(3);
    for (;;) {
      std::string limit = first_line(root + path + "/cpu.max");  // "200000 100000" or "max 100000"
      size_t space = limit.find(' ');
      if (space != std::string::npos)
        smallest = std::min(smallest, allowed_cpus(limit.substr(0, space), limit.substr(space + 1)));
      size_t slash = path.rfind('/');
      if (path.empty() || slash == std::string::npos) break;
      path = path.substr(0, slash);
    }
  }
  const std::string version_1 = root + "/cpu/";  // in a container: the container's control group
  return std::min(
      smallest, allowed_cpus(first_line(version_1 + "cpu.cfs_quota_us"), first_line(version_1 + "cpu.cfs_period_us")));
}

// The relative speed of a core: its capacity (Arm) or its maximum frequency (x86); 0 if unknown.
long speed_of(int cpu, const std::string& folder) {
  std::string core = folder + "cpu" + std::to_string(cpu) + "/";
  for (const char* file : {"cpu_capacity", "cpufreq/cpuinfo_max_freq"}) {
    std::string text = first_line(core + file);
    if (!text.empty()) return std::strtol(text.c_str(), nullptr, 10);
  }
  return 0;
}

}  // namespace

std::vector<int> fastest(std::vector<int> cpus, int count, const std::string& folder) {
  std::vector<long> speeds;
  for (int cpu : cpus) speeds.push_back(speed_of(cpu, folder));
  std::vector<size_t> order(cpus.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t one, size_t other) { return speeds[one] > speeds[other]; });
  order.resize(std::min(order.size(), (size_t)count));
  std::vector<int> chosen;
  for (size_t index : order) chosen.push_back(cpus[index]);
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

std::vector<int> cores() {
  std::vector<int> cpus;
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
    std::set<std::string> visited;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
      if (CPU_ISSET(cpu, &allowed) && visited.insert(core_of(cpu)).second) cpus.push_back(cpu);
  }
#endif
  if (cpus.empty())
    for (int cpu = 0; cpu < (int)std::max(1u, std::thread::hardware_concurrency()); cpu++) cpus.push_back(cpu);
  return cpus;
}

int usable_cores() {
  int count = (int)cores().size();
  double quota = cpu_quota();
  return quota < count ? std::max(1, (int)std::ceil(quota)) : count;
}

void pin([[maybe_unused]] int cpu) {
#if defined(__linux__)
  cpu_set_t cpu_set;
  CPU_ZERO(&cpu_set);
  CPU_SET(cpu, &cpu_set);
  pthread_setaffinity_np(pthread_self(), sizeof cpu_set, &cpu_set);
#endif
}

}  // namespace localllm
