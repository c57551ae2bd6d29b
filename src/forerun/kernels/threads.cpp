// The thread pool of ``parallel_for``. A worker spins for a moment, then sleeps until it is woken.
#include "threads.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#ifndef _WIN32
#include <pthread.h>
#include <signal.h>
#endif

namespace {

constexpr int JOBS = 8;  // concurrent calls that use the workers; another call runs on its own thread
// Workers should not fall asleep during a small model's host work between two forwards.
constexpr std::chrono::microseconds WORKER_SPINS{300}, CALLER_SPINS{30};

void pause() {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until ``ready``; false on timeout.
template <class Ready>
bool spin(std::chrono::microseconds longest, const Ready &ready) {
  const auto end = std::chrono::steady_clock::now() + longest;
  do {
    for (int i = 0; i < 16; i++) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

// Wakes one thread. What ``ready`` reads and what is written before ``ring`` must be sequentially consistent: then
// either the sleeper sees the write, or the ringer sees that it sleeps.
class Bell {
 public:
  template <class Ready>
  void wait(const Ready &ready) {
    std::unique_lock<std::mutex> lock(mutex);
    asleep.store(true);
    while (!ready()) condition.wait(lock);
    asleep.store(false);
  }

  void ring() {
    if (!asleep.load()) return;
    { const std::lock_guard<std::mutex> lock(mutex); }
    condition.notify_one();
  }

 private:
  std::mutex mutex;
  std::condition_variable condition;
  std::atomic<bool> asleep{false};
};

// Untaken chunks: the low 32 bits are the next one, the high 32 bits the end. A thread with a chunk may read its job,
// which stays until the chunk is done; a thread without one must not.
struct alignas(64) Segment {
  std::atomic<uint64_t> range{0};

  void fill(uint64_t next, uint64_t end) { range.store(end << 32 | next, std::memory_order_release); }

  // The owner takes from the front, others steal from the back.
  bool take(bool owner, int64_t &chunk) {
    uint64_t now = range.load(std::memory_order_relaxed);
    for (;;) {
      const uint32_t next = static_cast<uint32_t>(now), end = static_cast<uint32_t>(now >> 32);
      if (next >= end) return false;
      chunk = owner ? next : end - 1;
      const uint64_t then = owner ? now + 1 : now - (uint64_t(1) << 32);
      if (range.compare_exchange_weak(now, then, std::memory_order_acquire, std::memory_order_relaxed)) return true;
    }
  }
};

struct alignas(64) Job {
  std::atomic<bool> used{false};
  std::atomic<int> threads{0};  // that may take chunks; 0 between calls
  void (*body)(const void *, int64_t) = nullptr;
  const void *context = nullptr;
  std::atomic<bool> failed{false};
  alignas(64) std::atomic<int64_t> left{0};  // unfinished chunks
  Bell caller;
  Segment segments[MOST_WORKERS + 1];

  // Runs chunks while there are any. Returns whether there was one.
  bool help(int thread, int of) {
    bool any = false;
    int64_t chunk;
    for (int i = 0; i < of; i++)
      while (segments[(thread + i) % of].take(i == 0, chunk)) {
        any = true;
        try {
          body(context, chunk);
        } catch (...) {
          failed.store(true, std::memory_order_relaxed);
        }
        if (left.fetch_sub(1) == 1) caller.ring();
      }
    return any;
  }
};

class Workers {
 public:
  // False if no job is free.
  bool run(int64_t chunks, int threads, void (*body)(const void *, int64_t), const void *context) {
    Job *const job = claim();
    if (!job) return false;
    threads = 1 + start(static_cast<int>(std::min<int64_t>(threads, chunks)) - 1);
    job->body = body;
    job->context = context;
    job->failed.store(false, std::memory_order_relaxed);
    job->left.store(chunks);
    for (int i = 0; i < threads; i++) job->segments[i].fill(chunks * i / threads, chunks * (i + 1) / threads);
    job->threads.store(threads);
    calls.fetch_add(1);
    for (int i = 1; i < threads; i++) workers[i - 1]->bell.ring();
    job->help(0, threads);
    const auto done = [job] { return job->left.load() == 0; };
    if (!spin(CALLER_SPINS, done)) job->caller.wait(done);
    job->threads.store(0);
    const bool failed = job->failed.load(std::memory_order_relaxed);
    job->used.store(false, std::memory_order_release);
    if (failed) throw std::bad_alloc();
    return true;
  }

  void stop() {
    for (Job &job : jobs)
      while (job.used.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
    stopping.store(true);
    calls.fetch_add(1);
    for (int i = 0; i < started.load(); i++) {
      workers[i]->bell.ring();
      workers[i]->thread.join();
      workers[i].reset();
    }
    started.store(0);
    stopping.store(false);
    for (Job &job : jobs) job.used.store(false, std::memory_order_release);
  }

 private:
  struct Worker {
    Bell bell;
    std::thread thread;
  };

  Job *claim() {
    for (Job &job : jobs)
      if (!job.used.load(std::memory_order_relaxed) && !job.used.exchange(true, std::memory_order_acquire)) return &job;
    return nullptr;
  }

  // Starts up to ``count`` workers. Returns how many run: the system may refuse threads.
  int start(int count) {
    if (started.load() >= count) return count;
    const std::lock_guard<std::mutex> lock(starting);
#ifndef _WIN32
    sigset_t all, before;  // workers block signals, except for their own faults
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
    int there = started.load();
    try {
      for (; there < count; started.store(++there)) {
        auto worker = std::make_unique<Worker>();
        worker->thread = std::thread([this, at = worker.get(), number = there + 1] { live(*at, number); });
        workers[there] = std::move(worker);
      }
    } catch (const std::system_error &) {
    } catch (const std::bad_alloc &) {
    }
#ifndef _WIN32
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
    return std::min(there, count);
  }

  void live(Worker &self, int number) {
    for (;;) {
      const uint64_t now = calls.load();
      if (stopping.load()) return;
      bool any = false;
      for (Job &job : jobs) {
        const int threads = job.threads.load(std::memory_order_relaxed);
        if (number < threads) any |= job.help(number, threads);
      }
      if (any) continue;
      const auto called = [&] { return calls.load() != now; };
      if (!spin(WORKER_SPINS, called)) self.bell.wait(called);
    }
  }

  Job jobs[JOBS];
  std::unique_ptr<Worker> workers[MOST_WORKERS];
  std::atomic<int> started{0};
  std::mutex starting;
  std::atomic<bool> stopping{false};
  alignas(64) std::atomic<uint64_t> calls{0};
};

// Never destroyed: workers may sleep in it when the process ends. A forked child has no workers, and mutexes may be
// locked forever, so it starts anew.
std::atomic<Workers *> here{nullptr};

Workers &workers() {
  Workers *now = here.load();
  if (now) return *now;
#ifndef _WIN32
  static const int noted = pthread_atfork(nullptr, nullptr, [] { here.store(nullptr); });
  static_cast<void>(noted);
#endif
  auto fresh = std::make_unique<Workers>();
  if (here.compare_exchange_strong(now, fresh.get())) return *fresh.release();
  return *now;
}

}  // namespace

void run_chunks(int64_t chunks, int threads, void (*body)(const void *context, int64_t chunk), const void *context) {
  if (threads > 1 && chunks > 1 && workers().run(chunks, threads, body, context)) return;
  for (int64_t chunk = 0; chunk < chunks; chunk++) body(context, chunk);
}

void stop_threads() {
  if (Workers *const now = here.load()) now->stop();
}
