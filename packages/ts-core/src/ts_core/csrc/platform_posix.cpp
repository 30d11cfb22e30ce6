// Linux and macOS. Linux is what is tested.
#if !defined(_WIN32)

#include "platform.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <sched.h>
#include <stdio.h>
#include <sys/syscall.h>
#endif

#include <cstdint>

namespace ts::platform {

std::size_t page_bytes() {
  static const std::size_t bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

void* map_memory(std::size_t bytes, std::size_t alignment, std::string& why) {
  // Map enough to hold an aligned range, then give the ends back.
  const std::size_t page = page_bytes();
  const std::size_t extra = alignment > page ? alignment - page : 0;
  if (bytes == 0 || bytes > SIZE_MAX - extra) {
    why = "the size is not a mappable number of bytes";
    return nullptr;
  }
  void* mapped = mmap(nullptr, bytes + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                      -1, 0);
  if (mapped == MAP_FAILED) {
    why = std::string("mmap: ") + strerror(errno);
    return nullptr;
  }
  const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(mapped);
  const std::uintptr_t aligned = (start + alignment - 1) / alignment * alignment;
  const std::size_t before = aligned - start;
  const std::size_t after = extra - before;
  if (before > 0) munmap(mapped, before);
  if (after > 0) munmap(reinterpret_cast<void*>(aligned + bytes), after);
  return reinterpret_cast<void*>(aligned);
}

void unmap_memory(void* address, std::size_t bytes) { munmap(address, bytes); }

void advise_huge_pages(void* address, std::size_t bytes) {
#if defined(MADV_HUGEPAGE)
  madvise(address, bytes, MADV_HUGEPAGE);  // refused by kernels built without it; only a hint
#else
  (void)address;
  (void)bytes;
#endif
}

void* open_library(const char* name, std::string& why) {
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* words = dlerror();
    why = words != nullptr ? words : "dlopen failed";
  }
  return library;
}

void* find_symbol(void* library, const char* name) { return dlsym(library, name); }

const char* cuda_driver_library() {
#if defined(__APPLE__)
  return nullptr;
#else
  return "libcuda.so.1";
#endif
}

int affinity_cores() {
#if defined(__linux__)
  // The kernel's mask may be wider than cpu_set_t: grow it until the call accepts the size.
  for (int cpus = CPU_SETSIZE; cpus <= (1 << 16); cpus *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<std::size_t>(cpus));
    if (set == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(cpus));
    const int status = sched_getaffinity(0, bytes, set);
    const int count = status == 0 ? CPU_COUNT_S(bytes, set) : 0;
    const int error = errno;
    CPU_FREE(set);
    if (status == 0) return count > 0 ? count : 1;
    if (error != EINVAL) break;
  }
#endif
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? static_cast<int>(online) : 1;
}

#if defined(__linux__)

int memory_nodes() {
  // "0", "0-1" or "0,2-3": the last number is the highest node.
  std::FILE* file = std::fopen("/sys/devices/system/node/has_memory", "r");
  if (file == nullptr) return 1;
  int highest = 0;
  int number = 0;
  for (int character = std::fgetc(file); character != EOF; character = std::fgetc(file)) {
    if (character >= '0' && character <= '9') {
      number = number * 10 + (character - '0');
      if (number > 4096) break;
      highest = number > highest ? number : highest;
    } else {
      number = 0;
    }
  }
  std::fclose(file);
  return highest + 1;
}

int current_node() {
  unsigned cpu = 0;
  unsigned node = 0;
  return syscall(SYS_getcpu, &cpu, &node, nullptr) == 0 ? static_cast<int>(node) : -1;
}

bool nodes_of(const std::vector<const void*>& pages, std::vector<int>& nodes) {
  const std::uintptr_t page = page_bytes();
  std::vector<void*> starts;
  for (const void* address : pages) {
    starts.push_back(
        reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(address) / page * page));
  }
  nodes.assign(pages.size(), -1);
  // Without target nodes move_pages moves nothing and reports where each page is.
  return syscall(SYS_move_pages, 0, starts.size(), starts.data(), nullptr, nodes.data(), 0) == 0;
}

#else

int memory_nodes() { return 1; }
int current_node() { return -1; }
bool nodes_of(const std::vector<const void*>&, std::vector<int>&) { return false; }

#endif

void sleep_us(long microseconds) {
  timespec left{microseconds / 1000000, (microseconds % 1000000) * 1000};
  while (nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

long process_id() { return static_cast<long>(getpid()); }

void on_fork_child(void (*handler)()) { pthread_atfork(nullptr, nullptr, handler); }

}  // namespace ts::platform

#endif
