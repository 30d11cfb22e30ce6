// The CUDA driver, opened at first use. Nothing here needs CUDA headers or libraries to build, and
// nothing initializes the driver before one of these functions is called.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace ts::driver {

// The driver is absent, or a call to it failed; what() names the call and the driver's reason.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Opens this library as the driver from now on, or the system's again for ""; for tests, which bring
// a made-up one and leave nothing of it behind.
void use_library(const std::string& path);

// Empty when the driver can be used, else why it cannot.
std::string unavailable_reason();

struct Device {
  std::string name;
  std::uint64_t memory_bytes;
};

// CUDA version the driver supports (13000 for 13.0) and its devices; creates no context.
int version();
std::vector<Device> devices();

// Makes `device`'s primary context current on this thread for the object's lifetime, unless the
// thread has a current context already.
class ContextGuard {
 public:
  explicit ContextGuard(int device);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  bool pushed_ = false;
};

// True once everything before the event on its stream is done. The thread needs a context.
bool event_done(std::uint64_t event);
// Returns when the event is done, waiting inside the driver.
void event_synchronize(std::uint64_t event);

// Page-locks `bytes` at `address` for every context. Returns an empty string, or the driver's
// reason for refusing.
std::string register_memory(void* address, std::size_t bytes, int device);
std::string unregister_memory(void* address, int device);

}  // namespace ts::driver
