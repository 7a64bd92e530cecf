// Threads that help the kernels of this library, on cores that other processes do not use.
//
// The thread that calls a kernel divides the work into tasks. Caller and helpers take one task after another until none
// is left, so a late helper costs nothing. Tasks do not depend on the number of helpers, and so results do not either.
//
// Waiting helpers sleep. They work only if they make calls faster:
// - Three times a second, a helper reads how much other processes use this process's cores (`look`). There are as many
//   helpers as free cores.
// - A helper without a core would let the caller wait for the task that the helper took. The caller adds up waits that
//   are longer than a task may take. If the sum exceeds `PATIENCE`, the caller works alone for a second. Repeated
//   pauses last up to ten seconds.
// - Some calls are made without helpers, for comparison. If helpers do not make calls faster, they pause in the same
//   way.
//
// A helper that was not called for `IDLE` ends its thread, and starts again when it is called. Helpers work on tasks
// only during a call of `run`, and the pool is never destroyed. So the process may end at any time.

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <system_error>
#include <thread>

#ifdef __linux__
#include <sched.h>
#include <unistd.h>
#endif
#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace alfish {

constexpr int MAX_HELPERS = 7;
// Times in nanoseconds.
constexpr int64_t MICROSECOND = 1000, SECOND = 1000000000;
constexpr int64_t LOOK = SECOND * 3 / 10, IDLE = 5 * SECOND;
constexpr int64_t SPIN = 20 * MICROSECOND;  // longest busy wait of a caller for the last task; sleeping takes longer
constexpr int64_t PATIENCE = 8000 * MICROSECOND;
constexpr int64_t SHORTEST_PAUSE = SECOND, LONGEST_PAUSE = 10 * SECOND;
constexpr uint32_t ALONE = UINT32_MAX / 16;  // one call of 16 is made without helpers
// Helpers pause if calls with helpers take longer than this fraction of the time of calls without helpers.
constexpr double WORTH = 0.97;
// Part of a helper's core that other processes may use: while it helps, and before it begins to help.
constexpr double FREE = 0.3, FREE_AGAIN = 0.15;

inline int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Seconds since an arbitrary time; `idle` is the sum over all cores that this process may use.
struct Usage {
  double wall = 0, own = 0, idle = 0;
  int cores = 0;  // 0: unknown
};

inline Usage usage() {
  Usage found;
  found.wall = now() * 1e-9;
  rusage own{};
  getrusage(RUSAGE_SELF, &own);
  for (timeval each : {own.ru_utime, own.ru_stime}) found.own += each.tv_sec + each.tv_usec * 1e-6;
#ifdef __linux__
  cpu_set_t mine;
  std::FILE* file = sched_getaffinity(0, sizeof(mine), &mine) == 0 ? std::fopen("/proc/stat", "re") : nullptr;
  if (!file) return found;
  char line[512];
  while (std::fgets(line, sizeof(line), file) && line[0] == 'c') {
    int core;
    unsigned long long idle, waiting;
    bool is_core = std::isdigit(line[3]);  // otherwise the line is the sum over cores
    if (!is_core || std::sscanf(line, "cpu%d %*u %*u %*u %llu %llu", &core, &idle, &waiting) != 3) continue;
    if (core >= CPU_SETSIZE || !CPU_ISSET(core, &mine)) continue;
    found.idle += double(idle + waiting) / sysconf(_SC_CLK_TCK);
    ++found.cores;
  }
  std::fclose(file);
#endif
  return found;
}

class ThreadPool {
 public:
  // The pool of this process.
  static ThreadPool& instance() { return *current(); }

  // Sets the largest number of helpers. A pool that does not adapt calls all helpers in every call.
  void configure(int limit, bool adapts) {
    adapts_ = adapts;
    limit_ = std::clamp(limit, 0, MAX_HELPERS);
    allowed_ = adapts ? 0 : limit_.load();
  }

  // Whether kernels may have helpers.
  bool has_helpers() const { return limit_.load(std::memory_order_relaxed) > 0; }

  // Calls task(0), ..., task(count - 1), once each in any order, and returns when all are done.
  //
  // Calls with and without helpers are compared by their nanoseconds per unit of `work`.
  template <class Task>
  void run(int64_t count, int64_t work, const Task& task) {
    if (count < 2 || !has_helpers() || taken_.exchange(true, std::memory_order_acquire)) {
      for (int64_t i = 0; i < count; ++i) task(i);
      return;
    }
    int64_t began = now();
    if (adapts_ && began >= next_look_) {
      next_look_ = began + LOOK;
      look_is_due_ = true;
      call(0);
    }
    // The products of an update repeat, so calls without helpers are chosen by a hash, not every n-th.
    bool alone = !allowed_.load(std::memory_order_relaxed) || (adapts_ && ++num_calls_ * 2654435769u < ALONE);
    if (alone) {
      for (int64_t i = 0; i < count; ++i) task(i);
    } else {
      share(began, count, &task, [](const void* task, int64_t i) { (*static_cast<const Task*>(task))(i); });
    }
    (alone ? alone_ : together_).add(now() - began, work);
    taken_.store(false, std::memory_order_release);
  }

  // Writes the fields of `HelperCounts` (kernels.py), in order.
  void read(int64_t* to) const {
    *to++ = allowed_;
    for (auto* each : {&num_shared_, &num_tasks_, &num_helped_, &waited_, &num_pauses_}) *to++ = *each;
  }

 private:
  using Function = void (*)(const void*, int64_t);

  struct Helper {
    std::condition_variable wakes;
    bool is_called = false, is_alive = false;  // under `mutex_`
  };

  struct Rate {
    std::atomic<int64_t> nanoseconds{0}, work{0};

    void add(int64_t more_nanoseconds, int64_t more_work) { nanoseconds += more_nanoseconds, work += more_work; }

    // Returns the nanoseconds per unit of work since the last call of `take`; 0 if there was no work.
    double take() {
      auto time = double(nanoseconds.exchange(0)), amount = double(work.exchange(0));
      return amount > 0 ? time / amount : 0;
    }
  };

  ThreadPool() = default;

  static ThreadPool*& current() {
    static ThreadPool* pool = [] {
      // A forked process has no helper threads, and may have locks that they held.
      pthread_atfork(nullptr, nullptr, [] {
        auto* forked = new ThreadPool;
        forked->configure(current()->limit_, current()->adapts_);
        current() = forked;
      });
      return new ThreadPool;
    }();
    return pool;
  }

  // Shares tasks with helpers.
  void share(int64_t began, int64_t count, const void* task, Function function) {
    task_ = task, function_ = function, count_ = count;
#ifdef __SSE__
    float_mode_ = _mm_getcsr();
#endif
    unfinished_.store(count, std::memory_order_relaxed);
    // A thread that claims a task of this call reads the values that were written above.
    unclaimed_.store(++number_ << 32 | uint64_t(count), std::memory_order_release);
    call(0);
    int64_t done = claim(false), worked = now();
    await(worked);
    int64_t waited = now() - worked;
    num_shared_ += 1, num_tasks_ += count, num_helped_ += count - done, waited_ += waited;
    if (waited > 2 * (worked - began) / std::max<int64_t>(done, 1) + 50 * MICROSECOND) lost_ += waited;
    if (adapts_ && lost_ > PATIENCE) pause();
  }

  // Does tasks until all are claimed; returns their number.
  int64_t claim(bool helps) {
    int64_t done = 0;
    uint64_t seen = unclaimed_.load(std::memory_order_acquire);
    while (uint32_t(seen)) {
      // The exchange also compares the number of the call. So the values are read only while the caller waits for this
      // task.
      if (!unclaimed_.compare_exchange_weak(seen, seen - 1, std::memory_order_acquire)) continue;
#ifdef __SSE__
      if (helps) _mm_setcsr(float_mode_);
#endif
      function_(task_, count_ - uint32_t(seen));
      ++done;
      if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1 && helps) {
        { std::lock_guard<std::mutex> lock(mutex_); }  // now the caller either waits, or reads the new count
        finished_.notify_one();
      }
      seen = unclaimed_.load(std::memory_order_acquire);
    }
    return done;
  }

  void await(int64_t since) {
    while (unfinished_.load(std::memory_order_acquire)) {
      if (now() - since < SPIN) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      finished_.wait(lock, [this] { return !unfinished_.load(std::memory_order_acquire); });
    }
  }

  // Wakes a helper, and starts its thread if it has none.
  void call(int index) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Helper& helper = helpers_[index];
      if (!helper.is_alive) helper.is_alive = start(index);
      helper.is_called = true;
    }
    helpers_[index].wakes.notify_one();
  }

  // Returns whether a thread could be started.
  bool start(int index) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals must go to the main thread
    bool started = true;
    try {
      std::thread([this, index] { serve(index); }).detach();
    } catch (const std::system_error&) {
      started = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
  }

  void serve(int index) {
    Helper& own = helpers_[index];
    std::unique_lock<std::mutex> lock(mutex_);
    while (own.wakes.wait_for(lock, std::chrono::nanoseconds(IDLE), [&own] { return own.is_called; })) {
      own.is_called = false;
      lock.unlock();
      if (look_is_due_.exchange(false)) look();
      // Each helper wakes the next one, so the caller wakes only the first.
      if (uint32_t(unclaimed_) > 1 && index + 1 < allowed_) call(index + 1);
      claim(true);
      lock.lock();
    }
    own.is_alive = false;
  }

  // Sets the number of helpers from the use of cores by other processes and from the times of the last calls.
  void look() {
    Usage before = last_;
    last_ = usage();
    lost_ = 0;
    double wall = last_.wall - before.wall, alone = alone_.take(), together = together_.take();
    if (alone > 0) time_alone_ = time_alone_ > 0 ? (time_alone_ + alone) / 2 : alone;
    if (together > WORTH * time_alone_) return pause();
    if (now() < paused_until_) return;
    int fewest = limit_, most = limit_;
    if (last_.cores) {
      double others = (last_.cores * wall - (last_.idle - before.idle) - (last_.own - before.own)) / wall;
      double left = last_.cores - 1 - others;
      fewest = int(std::floor(left + FREE_AGAIN)), most = int(std::floor(left + FREE));
      if (last_.cores != before.cores) fewest = most = 0;
    }
    allowed_ = std::clamp(std::clamp(allowed_.load(), fewest, most), 0, limit_.load());
  }

  // Stops the use of helpers for twice as long as at the last pause, or for a second if the last pause is long ago.
  void pause() {
    int64_t began = now();
    pause_ = began - paused_until_ > LONGEST_PAUSE ? SHORTEST_PAUSE : std::min(2 * pause_, LONGEST_PAUSE);
    paused_until_ = began + pause_;
    allowed_ = 0, lost_ = 0;
    num_pauses_ += 1;
  }

  std::atomic<int> limit_{0}, allowed_{0};
  std::atomic<bool> adapts_{true};
  std::atomic<bool> taken_{false};  // true while a call uses the helpers; another caller then works alone

  // Values of the current call, written by its caller only.
  const void* task_ = nullptr;
  Function function_ = nullptr;
  int64_t count_ = 0;
  unsigned float_mode_ = 0;
  uint32_t num_calls_ = 0;
  uint64_t number_ = 0;
  // Upper 32 bits: number of the call. Lower 32 bits: number of its tasks that are not claimed.
  alignas(64) std::atomic<uint64_t> unclaimed_{0};
  std::atomic<int64_t> unfinished_{0};

  alignas(64) std::mutex mutex_;
  std::condition_variable finished_;
  Helper helpers_[MAX_HELPERS];

  // Values that determine how many helpers work.
  std::atomic<int64_t> next_look_{0}, lost_{0}, paused_until_{0}, pause_{0};
  std::atomic<bool> look_is_due_{false};
  Rate alone_, together_;
  Usage last_;
  double time_alone_ = 0;
  std::atomic<int64_t> num_shared_{0}, num_tasks_{0}, num_helped_{0}, waited_{0}, num_pauses_{0};
};

}  // namespace alfish

extern "C" void alfish_configure_helpers(int limit, bool adapts) {
  alfish::ThreadPool::instance().configure(limit, adapts);
}

extern "C" void alfish_read_helpers(int64_t* to) { alfish::ThreadPool::instance().read(to); }
