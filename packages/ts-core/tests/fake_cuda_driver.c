/* A made-up CUDA driver for tests: enough of the interface to page-lock memory and to wait for
 * events on a machine with no GPU, and counters to see what was called.
 *
 * An event is the address of a double: the CLOCK_MONOTONIC time, in seconds, at which it is done;
 * a negative one reports a failed kernel.
 * FAKE_CUDA_PIN_LIMIT: most bytes that may be page-locked. FAKE_CUDA_OBEY_MEMLOCK: RLIMIT_MEMLOCK
 * is that limit. FAKE_CUDA_NO_DEVICE: cuInit fails.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_CONTEXT = 201,
       NOT_READY = 600, LAUNCH_FAILED = 719, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };

typedef struct { char* base; size_t bytes; } Range;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Range ranges[256];
static int range_count;
static long queries, registrations, unregistrations, retained;
static int primary;
static __thread void* stack[8];
static __thread int depth;

long fake_queries(void) { return queries; }
long fake_registrations(void) { return registrations; }
long fake_unregistrations(void) { return unregistrations; }
long fake_retained(void) { return retained; }
int fake_context_depth(void) { return depth; }
size_t fake_registered_bytes(void) {
  size_t sum = 0;
  for (int i = 0; i < range_count; ++i) sum += ranges[i].bytes;
  return sum;
}
void fake_reset(void) {
  range_count = 0;
  queries = registrations = unregistrations = retained = 0;
}
int fake_is_registered(void* address, size_t bytes) {
  char* at = address;
  for (int i = 0; i < range_count; ++i) {
    if (at >= ranges[i].base && at + bytes <= ranges[i].base + ranges[i].bytes) return 1;
  }
  return 0;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

int cuInit(unsigned flags) { (void)flags; return getenv("FAKE_CUDA_NO_DEVICE") ? NO_DEVICE : SUCCESS; }
int cuDriverGetVersion(int* version) { *version = 13010; return SUCCESS; }
int cuDeviceGetCount(int* count) { *count = 1; return SUCCESS; }
int cuDeviceGet(int* id, int index) { *id = 40 + index; return index == 0 ? SUCCESS : INVALID_VALUE; }
int cuDeviceGetName(char* name, int bytes, int id) {
  if (id != 40) return INVALID_VALUE;
  strncpy(name, "Made-up GPU", (size_t)bytes);
  return SUCCESS;
}
int cuDeviceTotalMem_v2(size_t* bytes, int id) {
  *bytes = (size_t)8 << 30;
  return id == 40 ? SUCCESS : INVALID_VALUE;
}

int cuGetErrorName(int result, const char** name) {
  switch (result) {
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; return SUCCESS;
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return SUCCESS;
    case NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; return SUCCESS;
    case INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; return SUCCESS;
    case LAUNCH_FAILED: *name = "CUDA_ERROR_LAUNCH_FAILED"; return SUCCESS;
    default: return INVALID_VALUE;
  }
}
int cuGetErrorString(int result, const char** text) {
  if (result != OUT_OF_MEMORY) return INVALID_VALUE;
  *text = "out of memory";
  return SUCCESS;
}

int cuCtxGetCurrent(void** context) { *context = depth ? stack[depth - 1] : NULL; return SUCCESS; }
int cuCtxPushCurrent_v2(void* context) {
  if (context != &primary || depth == 8) return INVALID_CONTEXT;
  stack[depth++] = context;
  return SUCCESS;
}
int cuCtxPopCurrent_v2(void** context) {
  if (depth == 0) return INVALID_CONTEXT;
  *context = stack[--depth];
  return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void** context, int id) {
  if (id != 40) return INVALID_VALUE;
  ++retained;
  *context = &primary;
  return SUCCESS;
}

int cuEventQuery(void* event) {
  double done_at;
  __atomic_add_fetch(&queries, 1, __ATOMIC_RELAXED);
  if (depth == 0) return INVALID_CONTEXT;
  memcpy(&done_at, event, sizeof done_at);
  if (done_at < 0) return LAUNCH_FAILED;
  return now() >= done_at ? SUCCESS : NOT_READY;
}
int cuEventSynchronize(void* event) {
  double done_at;
  if (depth == 0) return INVALID_CONTEXT;
  memcpy(&done_at, event, sizeof done_at);
  if (done_at < 0) return LAUNCH_FAILED;
  while (now() < done_at) {
    struct timespec nap = {0, 1000000};
    nanosleep(&nap, NULL);
  }
  return SUCCESS;
}

int cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
  size_t limit = (size_t)-1;
  int result = SUCCESS;
  if (depth == 0) return INVALID_CONTEXT;
  if (flags != 1 || bytes == 0) return INVALID_VALUE; /* portable */
  if (getenv("FAKE_CUDA_PIN_LIMIT")) limit = strtoull(getenv("FAKE_CUDA_PIN_LIMIT"), NULL, 10);
  if (getenv("FAKE_CUDA_OBEY_MEMLOCK")) {
    struct rlimit memlock;
    getrlimit(RLIMIT_MEMLOCK, &memlock);
    limit = memlock.rlim_cur;
  }
  pthread_mutex_lock(&mutex);
  ++registrations;
  if (fake_registered_bytes() + bytes > limit || range_count == 256) {
    result = OUT_OF_MEMORY;
  } else if (fake_is_registered(address, 1)) {
    result = ALREADY_REGISTERED;
  } else {
    ranges[range_count].base = address;
    ranges[range_count++].bytes = bytes;
  }
  pthread_mutex_unlock(&mutex);
  return result;
}
int cuMemHostUnregister(void* address) {
  int result = NOT_REGISTERED;
  if (depth == 0) return INVALID_CONTEXT;
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < range_count; ++i) {
    if (ranges[i].base != (char*)address) continue;
    ranges[i] = ranges[--range_count];
    ++unregistrations;
    result = SUCCESS;
    break;
  }
  pthread_mutex_unlock(&mutex);
  return result;
}
