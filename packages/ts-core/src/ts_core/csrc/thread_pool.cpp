#include "thread_pool.h"

#include <atomic>
#include <condition_variable>
#include <list>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "platform.h"

namespace ts {
namespace {

constexpr int kMostThreads = 512;

struct Job {
  const std::function<void(std::size_t)>* body;
  std::size_t chunks;
  std::atomic<std::size_t> next{0};
  int open_places;      // workers that may still join (guarded by the pool's mutex)
  int workers_inside;   // workers that joined and have not left (guarded likewise)

  bool exhausted() const { return next.load(std::memory_order_relaxed) >= chunks; }

  void work() {
    for (;;) {
      const std::size_t chunk = next.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= chunks) return;
      (*body)(chunk);
    }
  }
};

class Pool {
 public:
  void run(std::size_t chunks, int threads, const std::function<void(std::size_t)>& body) {
    Job job;
    job.body = &body;
    job.chunks = chunks;
    job.open_places = threads - 1;
    job.workers_inside = 0;
    std::list<Job*>::iterator place;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      grow(threads - 1);
      place = jobs_.insert(jobs_.end(), &job);
    }
    // As many as can join: the others would wake for nothing.
    for (int worker = 1; worker < threads; ++worker) work_arrived_.notify_one();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    jobs_.erase(place);  // from here on nobody else can join
    worker_left_.wait(lock, [&] { return job.workers_inside == 0; });
  }

  int size() {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int>(workers_.size());
  }

  void stop() {
    std::vector<std::thread> leaving;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      leaving.swap(workers_);
    }
    work_arrived_.notify_all();
    for (std::thread& worker : leaving) worker.join();
  }

 private:
  void grow(int wanted) {  // holds mutex_
    if (wanted > kMostThreads) wanted = kMostThreads;
    while (!stopping_ && static_cast<int>(workers_.size()) < wanted) {
      try {
        workers_.emplace_back([this] { serve(); });
      } catch (const std::system_error&) {
        return;  // the system gives no more threads: the ones there, and the caller, do the work
      }
    }
  }

  Job* joinable_job() {  // holds mutex_
    for (Job* job : jobs_) {
      if (job->open_places > 0 && !job->exhausted()) return job;
    }
    return nullptr;
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job = nullptr;
      work_arrived_.wait(lock, [&] { return stopping_ || (job = joinable_job()) != nullptr; });
      if (job == nullptr) return;  // stopping
      --job->open_places;
      ++job->workers_inside;
      lock.unlock();
      job->work();
      lock.lock();
      if (--job->workers_inside == 0) worker_left_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable work_arrived_;
  std::condition_variable worker_left_;
  std::list<Job*> jobs_;
  std::vector<std::thread> workers_;
  bool stopping_ = false;
};

// Never deleted: a child of fork() must not touch the mutexes and threads of its parent's pool, and
// threads of Python may still be inside a loop while the process exits.
std::atomic<Pool*> current_pool{nullptr};
std::atomic<bool> shut_down{false};

Pool* get_pool() {
  Pool* pool = current_pool.load();
  if (pool == nullptr) {
    Pool* fresh = new Pool();
    if (current_pool.compare_exchange_strong(pool, fresh)) {
      pool = fresh;
    } else {
      delete fresh;
    }
  }
  return pool;
}

}  // namespace

void parallel_for(std::size_t chunks, int threads, const std::function<void(std::size_t)>& body) {
  if (static_cast<std::size_t>(threads) > chunks) threads = static_cast<int>(chunks);
  if (threads <= 1 || shut_down.load()) {
    for (std::size_t chunk = 0; chunk < chunks; ++chunk) body(chunk);
    return;
  }
  get_pool()->run(chunks, threads, body);
}

void forget_pool_in_children() {
  platform::on_fork_child([] { current_pool.store(nullptr); });
}

int pool_threads() {
  Pool* pool = current_pool.load();
  return pool != nullptr ? pool->size() : 0;
}

void shutdown_pool() {
  shut_down.store(true);
  Pool* pool = current_pool.load();
  if (pool != nullptr) pool->stop();
}

}  // namespace ts
