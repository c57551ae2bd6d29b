// The kernels' threads under ThreadSanitizer: starts and stops, several callers, forks before and after. ``make sanitize_threads``
#include "../../src/forerun/kernels/threads.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

static const int64_t COUNT = 1000;

// Plain numbers, so that a chunk that is taken twice, or read too early, is a race.
static bool sums(int threads) {
  std::vector<int64_t> out(COUNT, 0);
  parallel_for(COUNT, 10, threads, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) out[i] += i * i;
  });
  for (int64_t i = 0; i < COUNT; i++)
    if (out[i] != i * i) return false;
  return true;
}

static void check(bool good, const char *what) {
  if (good) return;
  fprintf(stderr, "wrong: %s\n", what);
  exit(1);
}

static void fork_once(const char *what) {
  const pid_t child = fork();
  check(child >= 0, "fork");
  if (child == 0) _exit(sums(3) && sums(2) ? 0 : 1);
  int status = 0;
  check(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, what);
}

int main(int argc, char **argv) {
  const int cycles = argc > 1 ? atoi(argv[1]) : 10000;
  fork_once("a fork before the first thread");
  for (int cycle = 0; cycle < cycles; cycle++) {
    check(sums(2 + cycle % 3), "a start");
    stop_threads();
  }
  check(sums(4), "before a fork");
  fork_once("a fork beside sleeping threads");
  check(sums(4), "after a fork");
  stop_threads();
  fork_once("a fork after the threads have ended");
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 12; caller++)
    callers.emplace_back([] {
      for (int i = 0; i < 200; i++) check(sums(2 + i % 3), "callers at once");
    });
  for (int i = 0; i < 20; i++) stop_threads();
  for (std::thread &caller : callers) caller.join();
  puts("ok");
}
