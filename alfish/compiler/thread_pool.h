// Threads that help the kernels of this library, on cores that nobody else wants.
//
// The thread that calls a kernel divides its work into tasks, and takes one after another until none is left. Helpers
// do the same, so one that comes late costs nothing. Tasks are the same for any number of helpers, and so are results.
//
// Threads that wait sleep. Helpers work only where it pays:
// - Three times a second one of them reads how long other processes used this process's cores (`look`). There are as
//   many helpers as cores are left.
// - A helper without a core would keep its caller waiting for the one task that it took. The caller adds up what it
//   waits for longer than a task may take. Beyond `PATIENCE` it works alone for a second, and then for up to ten.
// - Some calls are made alone, to compare. If helpers do not make calls faster, the same follows.
//
// A helper that nobody called for `IDLE` ends, and starts again when it is needed. None is ever in a task outside of a
// call of `run`, and the pool is never destroyed, so a process may end at any moment.

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
// Nanoseconds.
constexpr int64_t MICROSECOND = 1000, SECOND = 1000000000;
constexpr int64_t LOOK = SECOND * 3 / 10, IDLE = 5 * SECOND;
constexpr int64_t SPIN = 20 * MICROSECOND;  // a caller's wait for the last task; sleeping takes longer
constexpr int64_t PATIENCE = 8000 * MICROSECOND;
constexpr int64_t SHORTEST_PAUSE = SECOND, LONGEST_PAUSE = 10 * SECOND;
constexpr uint32_t ALONE = UINT32_MAX / 16;  // one call of 16 is made without helpers
constexpr double WORTH = 0.97;               // of a call's time alone that it may take with helpers
// Cores that other processes may use of one that a helper takes, and that they must have left before.
constexpr double FREE = 0.3, FREE_AGAIN = 0.15;

inline int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Seconds of all cores that this process may use, since some moment.
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
    bool is_core = std::isdigit(line[3]);  // else it is all of them
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

  // Sets the largest number of helpers. A pool that does not adapt calls all of them every time.
  void configure(int limit, bool adapts) {
    adapts_ = adapts;
    limit_ = std::clamp(limit, 0, MAX_HELPERS);
    allowed_ = adapts ? 0 : limit_.load();
  }

  // Whether kernels may have helpers.
  bool has_helpers() const { return limit_.load(std::memory_order_relaxed) > 0; }

  // Calls task(0), ..., task(count - 1), once each in any order, and returns when all are done.
  //
  // Calls are compared by their nanoseconds for each unit of `work`.
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
    // The products of an update repeat, so those that are made alone must not be every n-th.
    bool alone = !allowed_.load(std::memory_order_relaxed) || (adapts_ && ++num_calls_ * 2654435769u < ALONE);
    if (alone) {
      for (int64_t i = 0; i < count; ++i) task(i);
    } else {
      share(began, count, &task, [](const void* task, int64_t i) { (*static_cast<const Task*>(task))(i); });
    }
    (alone ? alone_ : together_).add(now() - began, work);
    taken_.store(false, std::memory_order_release);
  }

  // Writes the helpers that may work now, the calls that had helpers, their tasks, those of them that helpers did,
  // nanoseconds that callers waited for helpers, and pauses.
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

    // Returns nanoseconds for a unit of work since the last call; 0: there was none.
    double take() {
      auto time = double(nanoseconds.exchange(0)), amount = double(work.exchange(0));
      return amount > 0 ? time / amount : 0;
    }
  };

  ThreadPool() = default;

  static ThreadPool*& current() {
    static ThreadPool* pool = [] {
      // A forked process has none of the threads, and perhaps locks that they held.
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
    // Whoever claims a task of this number reads what was written above.
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
      // This compares the number too. So what the caller wrote is read while the caller waits for this task.
      if (!unclaimed_.compare_exchange_weak(seen, seen - 1, std::memory_order_acquire)) continue;
#ifdef __SSE__
      if (helps) _mm_setcsr(float_mode_);
#endif
      function_(task_, count_ - uint32_t(seen));
      ++done;
      if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1 && helps) {
        { std::lock_guard<std::mutex> lock(mutex_); }  // the caller waits already, or reads the new number
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

  // Returns whether the system gave a thread.
  bool start(int index) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // a signal shall interrupt the main thread
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

  // Sets the number of helpers by what other processes and the last calls took.
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

  // Makes calls without helpers, for twice as long as the last time, or for a second if that is long ago.
  void pause() {
    int64_t began = now();
    pause_ = began - paused_until_ > LONGEST_PAUSE ? SHORTEST_PAUSE : std::min(2 * pause_, LONGEST_PAUSE);
    paused_until_ = began + pause_;
    allowed_ = 0, lost_ = 0;
    num_pauses_ += 1;
  }

  std::atomic<int> limit_{0}, allowed_{0};
  std::atomic<bool> adapts_{true};
  std::atomic<bool> taken_{false};  // by the caller whose tasks are shared; another one works alone

  // Of the call; only its caller writes them.
  const void* task_ = nullptr;
  Function function_ = nullptr;
  int64_t count_ = 0;
  unsigned float_mode_ = 0;
  uint32_t num_calls_ = 0;
  uint64_t number_ = 0;
  // The number of the call above, and below how many of its tasks nobody has claimed.
  alignas(64) std::atomic<uint64_t> unclaimed_{0};
  std::atomic<int64_t> unfinished_{0};

  alignas(64) std::mutex mutex_;
  std::condition_variable finished_;
  Helper helpers_[MAX_HELPERS];

  // Of the decision how many helpers work.
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
