#include "cores.h"

#include <atomic>
#include <cmath>
#include <fstream>
#include <sstream>
#include <vector>

#include "platform.h"

namespace ts {
namespace {

std::atomic<int> overridden_cores{0};

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "max 100000" or "150000 100000" (v2's cpu.max); 0 when there is no quota or no such file.
double quota_v2(const std::string& directory) {
  std::istringstream words(first_line(directory + "/cpu.max"));
  std::string quota;
  double period = 0;
  if (!(words >> quota >> period) || quota == "max" || period <= 0) return 0;
  std::istringstream number(quota);
  double value = 0;
  return (number >> value) && value > 0 ? value / period : 0;
}

// v1's pair of files; a quota of -1 means none.
double quota_v1(const std::string& directory) {
  std::istringstream quota_words(first_line(directory + "/cpu.cfs_quota_us"));
  std::istringstream period_words(first_line(directory + "/cpu.cfs_period_us"));
  double quota = 0;
  double period = 0;
  if (!(quota_words >> quota) || !(period_words >> period)) return 0;
  return quota > 0 && period > 0 ? quota / period : 0;
}

void tighten(double& tightest, double quota) {
  if (quota > 0 && (tightest == 0 || quota < tightest)) tightest = quota;
}

// `mount` + `path` and each parent up to the mount itself (inside a container the path may be the
// host's and not exist here; the mount's own files then hold the limit).
template <typename ReadQuota>
void tighten_upwards(double& tightest, const std::string& mount, std::string path, ReadQuota read) {
  while (!path.empty() && path != "/") {
    tighten(tightest, read(mount + path));
    const std::size_t slash = path.find_last_of('/');
    if (slash == std::string::npos) break;
    path.resize(slash);
  }
  tighten(tightest, read(mount));
}

bool lists(const std::string& controllers, const std::string& wanted) {
  std::istringstream items(controllers);
  std::string item;
  while (std::getline(items, item, ',')) {
    if (item == wanted) return true;
  }
  return false;
}

}  // namespace

double cgroup_cpu_quota(const std::string& root) {
  double tightest = 0;
  std::ifstream file(root + "/proc/self/cgroup");
  std::string line;  // hierarchy:controllers:path
  while (std::getline(file, line)) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first == std::string::npos ? first : first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      for (const char* mount : {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"}) {
        tighten_upwards(tightest, root + mount, path, quota_v2);
      }
    } else if (lists(controllers, "cpu")) {
      for (const std::string& mount :
           std::vector<std::string>{"/sys/fs/cgroup/" + controllers, "/sys/fs/cgroup/cpu"}) {
        tighten_upwards(tightest, root + mount, path, quota_v1);
      }
    }
  }
  return tightest;
}

int usable_cores() {
  const int overridden = overridden_cores.load();
  if (overridden > 0) return overridden;
  static const double quota = cgroup_cpu_quota("");  // read once; affinity may change, so is not
  int cores = platform::affinity_cores();
  if (quota > 0 && quota < cores) cores = static_cast<int>(std::ceil(quota));
  return cores > 0 ? cores : 1;
}

void override_usable_cores(int cores) { overridden_cores.store(cores); }

int effective_threads(int requested) {
  const int usable = usable_cores();
  return requested > 0 && requested < usable ? requested : usable;
}

}  // namespace ts
