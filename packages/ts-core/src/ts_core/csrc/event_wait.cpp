#include "event_wait.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>

#include "driver.h"
#include "platform.h"

namespace ts {
namespace {

std::mutex settings_mutex;
WaitSettings current_settings;

}  // namespace

WaitSettings wait_settings() {
  std::lock_guard<std::mutex> lock(settings_mutex);
  return current_settings;
}

void set_wait_settings(const WaitSettings& settings) {
  std::lock_guard<std::mutex> lock(settings_mutex);
  current_settings = settings;
}

bool wait_event_for(std::uint64_t event, int device, std::int64_t budget_us, bool resumed) {
  using Clock = std::chrono::steady_clock;
  const WaitSettings settings = wait_settings();
  const driver::ContextGuard context(device);
  if (settings.policy == WaitPolicy::block) {
    driver::event_synchronize(event);
    return true;
  }
  const Clock::time_point start = Clock::now();
  for (;;) {
    if (driver::event_done(event)) return true;
    const std::int64_t waited_us =
        std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start).count();
    if (waited_us >= budget_us) return false;
    if (settings.policy == WaitPolicy::poll && (resumed || waited_us >= settings.spin_us)) {
      platform::sleep_us(static_cast<long>(
          std::min<std::int64_t>(settings.sleep_us, budget_us - waited_us)));
    }
  }
}

}  // namespace ts
