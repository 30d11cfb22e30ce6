// Waiting for an event of the device without holding a core: check for a short while, then sleep
// between checks.
#pragma once

#include <cstdint>
#include <string>

namespace ts {

enum class WaitPolicy {
  poll,   // check back to back for spin_us, then sleep sleep_us between checks
  spin,   // check back to back until done: lowest latency, holds a core
  block,  // wait inside the driver
};

struct WaitSettings {
  WaitPolicy policy = WaitPolicy::poll;
  long spin_us = 50;
  long sleep_us = 100;
};

WaitSettings wait_settings();
void set_wait_settings(const WaitSettings& settings);

// Waits at most `budget_us` (as long as it takes under WaitPolicy::block) and returns whether the
// event is done. `device` names the primary context used when the thread has none; `resumed` says
// that this continues a wait, whose time for checking back to back is over.
bool wait_event_for(std::uint64_t event, int device, std::int64_t budget_us, bool resumed);

}  // namespace ts
