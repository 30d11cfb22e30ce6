#include "cores.h"

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "platform.h"

namespace ts {
namespace {

std::atomic<int> overridden_cores{0};

// C's file functions, not iostreams: in a process that holds several copies of libstdc++ (as with
// some torch builds) a stream's locale may come from the other copy, which crashes.
std::vector<std::string> lines_of(const std::string& path) {
  std::vector<std::string> lines;
  std::FILE* file = std::fopen(path.c_str(), "r");
  if (file == nullptr) return lines;
  std::string line;
  for (int character = std::fgetc(file); character != EOF; character = std::fgetc(file)) {
    if (character == '\n') {
      lines.push_back(line);
      line.clear();
    } else {
      line += static_cast<char>(character);
    }
  }
  if (!line.empty()) lines.push_back(line);
  std::fclose(file);
  return lines;
}

std::string first_line(const std::string& path) {
  const std::vector<std::string> lines = lines_of(path);
  return lines.empty() ? std::string() : lines.front();
}

// Reads one number at `text` and moves past it; 0 when there is none.
double number_at(const char*& text) {
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  text = end;
  return std::isfinite(value) ? value : 0;
}

// "max 100000" or "150000 100000" (v2's cpu.max); 0 when there is no quota or no such file.
double quota_v2(const std::string& directory) {
  const std::string line = first_line(directory + "/cpu.max");
  const char* text = line.c_str();
  const double quota = number_at(text);
  const double period = number_at(text);
  return quota > 0 && period > 0 ? quota / period : 0;
}

// v1's pair of files; a quota of -1 means none.
double quota_v1(const std::string& directory) {
  const std::string quota_line = first_line(directory + "/cpu.cfs_quota_us");
  const std::string period_line = first_line(directory + "/cpu.cfs_period_us");
  const char* quota_text = quota_line.c_str();
  const char* period_text = period_line.c_str();
  const double quota = number_at(quota_text);
  const double period = number_at(period_text);
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

// Whether a comma-separated list has `wanted`.
bool lists(const std::string& controllers, const std::string& wanted) {
  return ("," + controllers + ",").find("," + wanted + ",") != std::string::npos;
}

}  // namespace

double cgroup_cpu_quota(const std::string& root) {
  double tightest = 0;
  for (const std::string& line : lines_of(root + "/proc/self/cgroup")) {
    // hierarchy:controllers:path
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
