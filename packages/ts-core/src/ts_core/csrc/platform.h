// The operating system behind a small interface. Every system call of the native core is made in
// platform_posix.cpp or platform_windows.cpp; nothing else includes a system header.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace ts::platform {

std::size_t page_bytes();

// Zeroed private memory, `bytes` rounded up to pages by the caller, lazily backed, aligned to
// `alignment` (a power of two, at least a page). Returns nullptr and fills `why` on failure.
void* map_memory(std::size_t bytes, std::size_t alignment, std::string& why);
void unmap_memory(void* address, std::size_t bytes);

// Asks for huge pages where the system has them; a hint that may be ignored.
void advise_huge_pages(void* address, std::size_t bytes);

// A shared library opened at run time, or nullptr with the loader's words in `why`.
void* open_library(const char* name, std::string& why);
void* find_symbol(void* library, const char* name);

// The CUDA driver's library on this system, or nullptr where there is none (macOS).
const char* cuda_driver_library();

// Cores that the calling thread may run on, at least 1.
int affinity_cores();

// NUMA nodes with memory, numbered from 0; 1 where the system does not tell.
int memory_nodes();
// The node that the calling thread runs on, or -1.
int current_node();
// The node of each page (negative for one not touched yet); false when the system refuses to tell.
bool nodes_of(const std::vector<const void*>& pages, std::vector<int>& nodes);

void sleep_us(long microseconds);
long process_id();

// Calls `handler` in a child process right after fork(); does nothing where there is no fork.
void on_fork_child(void (*handler)());

}  // namespace ts::platform
