#include "driver.h"

#include <atomic>
#include <map>
#include <mutex>

#include "platform.h"

#if defined(_WIN32)
#define TS_CUDA_CALL __stdcall
#else
#define TS_CUDA_CALL
#endif

namespace ts::driver {
namespace {

// The part of cuda.h that is used; its binary interface is stable.
using Result = int;
using DeviceId = int;
using Context = void*;
using Event = void*;
constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;
constexpr unsigned kRegisterPortable = 1;

struct Table {
  std::string reason;  // empty when usable
  Result(TS_CUDA_CALL* init)(unsigned);
  Result(TS_CUDA_CALL* driver_version)(int*);
  Result(TS_CUDA_CALL* error_name)(Result, const char**);
  Result(TS_CUDA_CALL* error_string)(Result, const char**);
  Result(TS_CUDA_CALL* device_count)(int*);
  Result(TS_CUDA_CALL* device_get)(DeviceId*, int);
  Result(TS_CUDA_CALL* device_name)(char*, int, DeviceId);
  Result(TS_CUDA_CALL* device_memory)(std::size_t*, DeviceId);
  Result(TS_CUDA_CALL* context_current)(Context*);
  Result(TS_CUDA_CALL* context_push)(Context);
  Result(TS_CUDA_CALL* context_pop)(Context*);
  Result(TS_CUDA_CALL* primary_retain)(Context*, DeviceId);
  Result(TS_CUDA_CALL* event_query)(Event);
  Result(TS_CUDA_CALL* event_wait)(Event);
  Result(TS_CUDA_CALL* host_register)(void*, std::size_t, unsigned);
  Result(TS_CUDA_CALL* host_unregister)(void*);
};

std::string words(const Table& table, const char* call, Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  table.error_name(result, &name);
  table.error_string(result, &text);
  return std::string(call) + ": " + (name != nullptr ? name : "error " + std::to_string(result)) +
         (text != nullptr ? std::string(" (") + text + ")" : std::string());
}

template <typename Function>
void resolve(Table& table, void* library, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(platform::find_symbol(library, symbol));
  if (function == nullptr && table.reason.empty()) {
    table.reason = std::string("the CUDA driver has no ") + symbol + "; install a newer one";
  }
}

Table open_driver(const std::string& other_library) {
  Table table{};
  const char* name =
      other_library.empty() ? platform::cuda_driver_library() : other_library.c_str();
  if (name == nullptr) {
    table.reason = "there is no CUDA driver for this system";
    return table;
  }
  std::string why;
  void* library = platform::open_library(name, why);
  if (library == nullptr) {
    table.reason = "no CUDA driver (" + why + ")";
    return table;
  }
  resolve(table, library, "cuInit", table.init);
  resolve(table, library, "cuDriverGetVersion", table.driver_version);
  resolve(table, library, "cuGetErrorName", table.error_name);
  resolve(table, library, "cuGetErrorString", table.error_string);
  resolve(table, library, "cuDeviceGetCount", table.device_count);
  resolve(table, library, "cuDeviceGet", table.device_get);
  resolve(table, library, "cuDeviceGetName", table.device_name);
  resolve(table, library, "cuDeviceTotalMem_v2", table.device_memory);
  resolve(table, library, "cuCtxGetCurrent", table.context_current);
  resolve(table, library, "cuCtxPushCurrent_v2", table.context_push);
  resolve(table, library, "cuCtxPopCurrent_v2", table.context_pop);
  resolve(table, library, "cuDevicePrimaryCtxRetain", table.primary_retain);
  resolve(table, library, "cuEventQuery", table.event_query);
  resolve(table, library, "cuEventSynchronize", table.event_wait);
  resolve(table, library, "cuMemHostRegister_v2", table.host_register);
  resolve(table, library, "cuMemHostUnregister", table.host_unregister);
  if (!table.reason.empty()) return table;
  const Result result = table.init(0);
  if (result != kSuccess) table.reason = words(table, "cuInit", result);
  return table;
}

// The driver in use, with its primary contexts, retained once per device for the life of the
// process: torch retains the same ones, and releasing the last reference would destroy what other
// threads still use. Never deleted, so that references to it stay good.
struct Driver {
  explicit Driver(const std::string& other_library) : table(open_driver(other_library)) {}
  const Table table;
  std::mutex mutex;
  std::map<int, Context> contexts;
};

std::mutex opening;
std::string library;
std::atomic<Driver*> current{nullptr};

Driver& driver() {
  Driver* found = current.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  std::lock_guard<std::mutex> lock(opening);
  if (current.load() == nullptr) current.store(new Driver(library));
  return *current.load();
}

const Table& opened() { return driver().table; }

const Table& usable() {
  const Table& table = opened();
  if (!table.reason.empty()) throw Error(table.reason);
  return table;
}

void check(const Table& table, const char* call, Result result) {
  if (result != kSuccess) throw Error(words(table, call, result));
}

Context primary_context(int device) {
  Driver& in_use = driver();
  const Table& table = in_use.table;
  std::lock_guard<std::mutex> lock(in_use.mutex);
  const auto found = in_use.contexts.find(device);
  if (found != in_use.contexts.end()) return found->second;
  DeviceId id = 0;
  Context context = nullptr;
  check(table, "cuDeviceGet", table.device_get(&id, device));
  check(table, "cuDevicePrimaryCtxRetain", table.primary_retain(&context, id));
  in_use.contexts[device] = context;
  return context;
}

Event as_event(std::uint64_t event) {
  return reinterpret_cast<Event>(static_cast<std::uintptr_t>(event));
}

}  // namespace

void use_library(const std::string& path) {
  std::lock_guard<std::mutex> lock(opening);
  library = path;
  current.store(nullptr);
}

std::string unavailable_reason() { return opened().reason; }

int version() {
  const Table& table = usable();
  int number = 0;
  check(table, "cuDriverGetVersion", table.driver_version(&number));
  return number;
}

std::vector<Device> devices() {
  const Table& table = usable();
  int count = 0;
  check(table, "cuDeviceGetCount", table.device_count(&count));
  std::vector<Device> found;
  for (int index = 0; index < count; ++index) {
    DeviceId id = 0;
    char name[256] = {};
    std::size_t bytes = 0;
    check(table, "cuDeviceGet", table.device_get(&id, index));
    check(table, "cuDeviceGetName", table.device_name(name, sizeof(name) - 1, id));
    check(table, "cuDeviceTotalMem", table.device_memory(&bytes, id));
    found.push_back({name, bytes});
  }
  return found;
}

ContextGuard::ContextGuard(int device) {
  const Table& table = usable();
  Context current = nullptr;
  check(table, "cuCtxGetCurrent", table.context_current(&current));
  if (current != nullptr) return;
  check(table, "cuCtxPushCurrent", table.context_push(primary_context(device)));
  pushed_ = true;
}

ContextGuard::~ContextGuard() {
  Context popped = nullptr;
  if (pushed_) opened().context_pop(&popped);
}

bool event_done(std::uint64_t event) {
  const Table& table = usable();
  const Result result = table.event_query(as_event(event));
  if (result == kNotReady) return false;
  check(table, "cuEventQuery", result);
  return true;
}

void event_synchronize(std::uint64_t event) {
  const Table& table = usable();
  check(table, "cuEventSynchronize", table.event_wait(as_event(event)));
}

std::string register_memory(void* address, std::size_t bytes, int device) {
  try {
    const ContextGuard context(device);
    const Table& table = usable();
    const Result result = table.host_register(address, bytes, kRegisterPortable);
    return result == kSuccess ? std::string() : words(table, "cuMemHostRegister", result);
  } catch (const Error& error) {
    return error.what();
  }
}

std::string unregister_memory(void* address, int device) {
  try {
    const ContextGuard context(device);
    const Table& table = usable();
    const Result result = table.host_unregister(address);
    return result == kSuccess ? std::string() : words(table, "cuMemHostUnregister", result);
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace ts::driver
