#include "numa.h"

#include <atomic>
#include <cstdint>
#include <vector>

#include "platform.h"
#include "thread_pool.h"

namespace ts {
namespace {

std::atomic<int> pretended{0};
std::atomic<int> arrivals{0};
std::atomic<std::size_t> ran_near{0};
std::atomic<std::size_t> ran_far{0};

int nodes_here() {
  const int told = pretended.load();
  if (told > 0) return told;
  static const int nodes = platform::memory_nodes();
  return nodes;
}

int my_node(int nodes) {
  if (pretended.load() > 0) {
    thread_local const int arrival = arrivals.fetch_add(1);
    return arrival % nodes;
  }
  const int node = platform::current_node();
  return node >= 0 && node < nodes ? node : 0;
}

bool find_nodes(const std::vector<const void*>& pages, std::vector<int>& found) {
  const int told = pretended.load();
  if (told == 0) return platform::nodes_of(pages, found);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    found[i] = static_cast<int>((reinterpret_cast<std::uintptr_t>(pages[i]) >> 16) %
                                static_cast<std::uintptr_t>(told));
  }
  return true;
}

struct alignas(64) Queue {  // the chunks of one node
  std::vector<std::size_t> chunks;
  std::atomic<std::size_t> next{0};
};

}  // namespace

void parallel_for_near(std::size_t chunks, int threads,
                       const std::function<const void*(std::size_t)>& address_of,
                       const std::function<void(std::size_t)>& body) {
  const int nodes = nodes_here();
  std::vector<int> node_of(chunks);
  std::vector<const void*> pages;
  const bool worth_it = nodes > 1 && threads > 1 && chunks > 1;
  for (std::size_t chunk = 0; worth_it && chunk < chunks; ++chunk) {
    pages.push_back(address_of(chunk));
  }
  if (!worth_it || !find_nodes(pages, node_of)) {
    parallel_for(chunks, threads, body);
    return;
  }
  std::vector<Queue> queues(static_cast<std::size_t>(nodes));
  for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
    const int node = node_of[chunk];
    queues[static_cast<std::size_t>(node >= 0 && node < nodes ? node : 0)].chunks.push_back(chunk);
  }
  // Each turn takes one chunk and there are as many turns as chunks: none finds all queues empty.
  parallel_for(chunks, threads, [&](std::size_t) {
    const int home = my_node(nodes);
    for (int away = 0; away < nodes; ++away) {
      Queue& queue = queues[static_cast<std::size_t>((home + away) % nodes)];
      if (queue.next.load(std::memory_order_relaxed) >= queue.chunks.size()) continue;
      const std::size_t place = queue.next.fetch_add(1, std::memory_order_relaxed);
      if (place >= queue.chunks.size()) continue;
      if (pretended.load() > 0) (away == 0 ? ran_near : ran_far).fetch_add(1);
      body(queue.chunks[place]);
      return;
    }
  });
}

void pretend_nodes(int nodes) {
  ran_near.store(0);
  ran_far.store(0);
  pretended.store(nodes);
}

std::size_t pretended_near() { return ran_near.load(); }
std::size_t pretended_far() { return ran_far.load(); }

}  // namespace ts
