// Windows counterpart of platform_posix.cpp. Written from the documentation; not tested.
#if defined(_WIN32)

#define NOMINMAX
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include "platform.h"

namespace ts::platform {

static std::string last_error(const char* call) {
  return std::string(call) + ": error " + std::to_string(GetLastError());
}

std::size_t page_bytes() {
  SYSTEM_INFO info;
  GetSystemInfo(&info);
  return info.dwPageSize;
}

void* map_memory(std::size_t bytes, std::size_t alignment, std::string& why) {
  // VirtualAlloc aligns to 64 KiB; wider alignments serve huge pages, which need a privilege here.
  (void)alignment;
  void* address = VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
  if (address == nullptr) why = last_error("VirtualAlloc");
  return address;
}

void unmap_memory(void* address, std::size_t bytes) {
  (void)bytes;
  VirtualFree(address, 0, MEM_RELEASE);
}

void advise_huge_pages(void* address, std::size_t bytes) {
  (void)address;
  (void)bytes;
}

void* open_library(const char* name, std::string& why) {
  HMODULE library = LoadLibraryExA(name, nullptr, LOAD_LIBRARY_SEARCH_SYSTEM32);
  if (library == nullptr) why = last_error("LoadLibraryEx");
  return reinterpret_cast<void*>(library);
}

void* find_symbol(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(reinterpret_cast<HMODULE>(library), name));
}

const char* cuda_driver_library() { return "nvcuda.dll"; }

int affinity_cores() {
  DWORD_PTR process_mask = 0;
  DWORD_PTR system_mask = 0;
  int count = 0;
  if (GetProcessAffinityMask(GetCurrentProcess(), &process_mask, &system_mask)) {
    for (; process_mask != 0; process_mask &= process_mask - 1) ++count;
  }
  return count > 0 ? count : 1;
}

int memory_nodes() { return 1; }
int current_node() { return -1; }
bool nodes_of(const std::vector<const void*>&, std::vector<int>&) { return false; }

void sleep_us(long microseconds) {
  const long milliseconds = (microseconds + 999) / 1000;
  Sleep(static_cast<DWORD>(milliseconds));
}

long process_id() { return static_cast<long>(GetCurrentProcessId()); }

void on_fork_child(void (*handler)()) { (void)handler; }

}  // namespace ts::platform

#endif
