// Checks of thread_pool.h, which stands before this file; `test_thread_pool.py` compiles and runs them.
//
// The first argument names the check, the second is a file in place of /proc/stat, which the check writes.

#include <unistd.h>

#include <sys/wait.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

using alfish::MICROSECOND;
using alfish::ThreadPool;

namespace {

#define REQUIRE(condition)                                            \
  if (!(condition)) {                                                 \
    std::fprintf(stderr, "line %d: %s\n", __LINE__, #condition);      \
    std::exit(1);                                                     \
  }

struct Counts {
  int64_t allowed, calls, tasks, helped, waited, pauses;
};

Counts counts() {
  Counts found;
  ThreadPool::instance().read(&found.allowed);
  return found;
}

void spin(int64_t nanoseconds) {
  for (int64_t began = alfish::now(); alfish::now() - began < nanoseconds;) continue;
}

// Of other processes; idle, with room for a reading that comes late.
constexpr double IDLE_CORES = -5, BUSY_CORE = 1;

// Writes idle times of two cores, of which this process used what it did and others `busy`.
void write_stat(double busy) {
  static double idle = 1000, wall = alfish::now() * 1e-9, own = alfish::usage().own;
  double wall_now = alfish::now() * 1e-9, own_now = alfish::usage().own;
  idle += (2 - busy) * (wall_now - wall) - (own_now - own);
  wall = wall_now, own = own_now;
  std::string next = std::string(stat_file) + ".next";
  std::FILE* file = std::fopen(next.c_str(), "w");
  std::fprintf(file, "cpu  7 7 7 7 7 7\n");
  for (int core = 0; core < 2; ++core) {
    std::fprintf(file, "cpu%d 1 2 3 %lld 0 6\n", core, core ? 0 : static_cast<long long>(idle * sysconf(_SC_CLK_TCK)));
  }
  std::fprintf(file, "intr 7\n");
  std::fclose(file);
  std::rename(next.c_str(), stat_file);
}

// Makes calls of 8 tasks until the helpers that may work are so many. Without `work`, calls are not compared.
template <class Task>
void run_until(int64_t allowed, double busy, int64_t work, const Task& task) {
  auto& pool = ThreadPool::instance();
  for (int64_t began = alfish::now(); counts().allowed != allowed;) {
    REQUIRE(alfish::now() - began < 30 * alfish::SECOND);
    write_stat(busy);
    for (int k = 0; k < 10; ++k) pool.run(8, work, task);
  }
}

constexpr auto nothing = [](int64_t) {};

// Works until a helper took part; on a busy machine they may come late often.
template <class Work>
void work_until_helped(const Work& work) {
  do {
    work();
  } while (!counts().helped);
}

// Returns how many tasks a helper was still doing when its caller had none left.
int make_calls_of_two_threads() {
  auto& pool = ThreadPool::instance();
  std::atomic<int> late{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 2; ++caller) {
    callers.emplace_back([&] {
      for (int64_t k = 0; k < 3000; ++k) {
        int64_t count = k % 9;
        std::vector<int64_t> done(count, 0);  // not atomic: a task that two threads do is a race
        auto own = std::this_thread::get_id();
        pool.run(count, 1, [&](int64_t i) {
          bool is_slow = k % 50 == 8, helps = std::this_thread::get_id() != own;
          if (is_slow && helps) ++late, usleep(1000);
          if (is_slow && !helps) spin(50 * MICROSECOND);
          done[i] += i + k;
        });
        for (int64_t i = 0; i < count; ++i) REQUIRE(done[i] == i + k);
      }
    });
  }
  for (auto& caller : callers) caller.join();
  return late;
}

void every_task_is_done_once() {
  ThreadPool::instance().configure(3, false);
  for (int late = 0; late < 4;) late += make_calls_of_two_threads();
}

void helpers_give_way() {
  ThreadPool::instance().configure(1, true);
  REQUIRE(counts().allowed == 0);
  for (int k = 0; k < 3; ++k) {
    run_until(1, IDLE_CORES, 0, nothing);
    run_until(0, BUSY_CORE, 0, nothing);
  }
  REQUIRE(counts().pauses < 3);  // on a busy machine there may be one
}

void helpers_that_are_held_up_are_sent_away() {
  ThreadPool::instance().configure(1, true);
  run_until(1, IDLE_CORES, 0, nothing);
  auto caller = std::this_thread::get_id();
  auto before = counts();
  run_until(0, IDLE_CORES, 0, [caller](int64_t) {
    if (std::this_thread::get_id() == caller) {
      spin(20 * MICROSECOND);
    } else {
      usleep(3000);
    }
  });
  auto after = counts();
  REQUIRE(after.pauses == before.pauses + 1);
  REQUIRE(after.waited - before.waited < 100000 * MICROSECOND);
}

void helpers_that_slow_calls_are_sent_away() {
  ThreadPool::instance().configure(1, true);
  // The caller takes task 0 and never waits for a helper.
  auto task = [](int64_t i) {
    if (i == 0) spin((counts().allowed ? 500 : 50) * MICROSECOND);
  };
  run_until(1, IDLE_CORES, 8, nothing);
  auto before = counts();
  run_until(0, IDLE_CORES, 8, task);
  REQUIRE(counts().pauses == before.pauses + 1);
  int64_t began = alfish::now();
  run_until(1, IDLE_CORES, 8, task);
  REQUIRE(alfish::now() - began > alfish::SHORTEST_PAUSE / 2);
}

void a_forked_process_has_its_own_helpers() {
  auto& pool = ThreadPool::instance();
  pool.configure(2, false);
  auto work = [] {
    std::atomic<int64_t> sum{0};
    for (int k = 0; k < 100; ++k) {
      ThreadPool::instance().run(8, 1, [&](int64_t i) { sum += i, spin(20 * MICROSECOND); });
    }
    REQUIRE(sum == 100 * 28);
  };
  work_until_helped(work);
  pid_t child = fork();
  if (child == 0) {
    REQUIRE(counts().helped == 0);
    work_until_helped(work);
    std::exit(0);
  }
  int status = 0;
  work();
  REQUIRE(waitpid(child, &status, 0) == child && status == 0);
}

int num_threads() {
  char line[256];
  int found = 0;
  std::FILE* file = std::fopen("/proc/self/status", "r");
  while (std::fgets(line, sizeof(line), file)) std::sscanf(line, "Threads: %d", &found);
  std::fclose(file);
  return found;
}

void helpers_without_work_sleep_and_end() {
  auto& pool = ThreadPool::instance();
  int before = num_threads();
  pool.configure(2, false);
  REQUIRE(num_threads() == before);
  auto work = [&pool] { pool.run(8, 1, [](int64_t) { spin(200 * MICROSECOND); }); };
  work();
  REQUIRE(num_threads() > before);
  double used = alfish::usage().own;
  usleep(alfish::IDLE / MICROSECOND / 2);
  REQUIRE(alfish::usage().own - used < 0.02);  // of 0.1 seconds, which waiting in a loop would use
  for (int i = 0; num_threads() > before; ++i) {
    REQUIRE(i < 1000);
    usleep(10000);
  }
  work();
  REQUIRE(num_threads() > before);
}

void helpers_compute_in_the_callers_mode() {
#ifdef __SSE__
  auto& pool = ThreadPool::instance();
  pool.configure(2, false);
  for (unsigned mode : {0x9fc0u, 0x1f80u}) {  // with and without denormal numbers
    _mm_setcsr(mode);
    auto before = counts().helped;
    while (counts().helped == before) {
      std::atomic<int> wrong{0};
      pool.run(8, 1, [&](int64_t) { wrong += _mm_getcsr() != mode, spin(20 * MICROSECOND); });
      REQUIRE(wrong == 0);
    }
  }
#endif
}

}  // namespace

int main(int, char** arguments) {
  stat_file = arguments[2];
#define CHECK(name) \
  if (!std::strcmp(arguments[1], #name)) return name(), 0;
  CHECK(every_task_is_done_once)
  CHECK(helpers_give_way)
  CHECK(helpers_that_are_held_up_are_sent_away)
  CHECK(helpers_that_slow_calls_are_sent_away)
  CHECK(a_forked_process_has_its_own_helpers)
  CHECK(helpers_without_work_sleep_and_end)
  CHECK(helpers_compute_in_the_callers_mode)
  return 2;
}
