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

}  // namespace

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
