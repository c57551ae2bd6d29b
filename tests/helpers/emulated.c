// Calls a library's functions for another process, from which it takes memory as it is touched: by an address that is not
// mapped here, page by page, and after the call it writes back what has changed. So a library for another processor, run
// by an emulator, computes on the tensors of the tests' own process.
//
// emulated LIBRARY MEMORY: MEMORY is an open file, the other's /proc/self/mem. Reads a ``Request`` after another from
// standard input; writes the whole number that the function returned, or 0 and a text, with its length between them.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

enum { PAGE = 4096, MOST = 1 << 18 };  // pages that a call may touch: a gigabyte

struct Request {
  char name[64];
  int64_t text, numbers[16];  // whether a text is returned
  float floats[4];
};

static int memory;
static char *pages[MOST], *before;  // those that are mapped, and what they held
static int count;
static atomic_flag taken = ATOMIC_FLAG_INIT;
static _Thread_local int again;  // faults in a row at pages that are there

// The library's too: in glibc's, some bytes behind the one whose page is taken keep what they held under qemu 7.2.
void *memset(void *to, int value, size_t count) {
  volatile char *const at = to;
  for (size_t i = 0; i < count; i++) at[i] = (char)value;
  return to;
}

static _Noreturn void give_up(const char *why, const void *at) {
  dprintf(2, "emulated: %s: %p\n", why, at);
  _exit(3);
}

static void take_page(int signal, siginfo_t *info, void *context) {
  (void)signal, (void)context;
  char *const at = (char *)((uintptr_t)info->si_addr & ~(uintptr_t)(PAGE - 1));
  while (atomic_flag_test_and_set(&taken)) usleep(1);
  if (msync(at, PAGE, MS_ASYNC) == 0) {  // another thread was sooner
    if (++again > 1000) give_up("a function of the caller's, or the emulator's own memory", at);
  } else {
    again = 0;
    if (count == MOST) give_up("too many pages", at);
    char *const here = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (here == MAP_FAILED || pread(memory, here, PAGE, (off_t)(uintptr_t)at) != PAGE) give_up("no memory of the caller's", info->si_addr);
    memcpy(before + (int64_t)count * PAGE, here, PAGE);
    pages[count++] = at;
    if (mremap(here, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, at) != at) give_up("cannot map", at);
  }
  atomic_flag_clear(&taken);
}

static void give_back(void) {
  for (int i = 0; i < count; i++) {
    const char *const was = before + (int64_t)i * PAGE;
    for (int from = 0, to; from < PAGE; from = to + 1) {
      while (from < PAGE && pages[i][from] == was[from]) from++;
      for (to = from; to < PAGE && pages[i][to] != was[to]; to++) {
      }
      if (from < to && pwrite(memory, pages[i] + from, to - from, (off_t)(uintptr_t)(pages[i] + from)) != to - from)
        give_up("cannot write", pages[i]);
    }
    munmap(pages[i], PAGE);
  }
  count = 0;
}

int main(int argc, char **argv) {
  if (argc != 3) give_up("a library and an open file are wanted", NULL);
  void *const library = dlopen(argv[1], RTLD_NOW);
  if (!library) give_up(dlerror(), NULL);
  memory = atoi(argv[2]);
  before = mmap(NULL, (size_t)MOST * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});  // tests call what the processor lacks
  struct sigaction action = {.sa_sigaction = take_page, .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigaction(SIGSEGV, &action, NULL);
  struct Request r;
  while (fread(&r, sizeof r, 1, stdin) == 1) {
    void *const function = dlsym(library, r.name);
    if (!function) give_up(r.name, NULL);
    const int64_t *const n = r.numbers;
    int64_t result = 0;
    const char *text = "";
    if (r.text) {
      text = ((const char *(*)(int64_t))function)(n[0]);
    } else {  // whole numbers and floats are counted apart, in registers and behind them
      result = ((int (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                         int64_t, int64_t, int64_t, int64_t, int64_t, float, float, float, float))function)(
          n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13], n[14], n[15],
          r.floats[0], r.floats[1], r.floats[2], r.floats[3]);
      give_back();
    }
    const int64_t said[2] = {result, (int64_t)strlen(text)};
    fwrite(said, sizeof said, 1, stdout);
    fwrite(text, 1, said[1], stdout);
    fflush(stdout);
  }
  return 0;
}
