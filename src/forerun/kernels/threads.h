// A thread pool. ``parallel_for`` splits a range into chunks; the caller starts at once and workers help. A thread
// takes the chunks of its own segment first, the same in every call, so that weights stay in its cache; then it steals.
// No call waits for a worker that has not started, so a busy machine delays a call by at most a chunk. Results must not
// depend on the thread or on the size of chunks.
#pragma once
#include <algorithm>
#include <cstdint>

constexpr int MOST_WORKERS = 255;          // besides the caller
constexpr int64_t CHUNKS_PER_THREAD = 16;  // at most
constexpr int64_t GRAIN = 1 << 15;         // minimum bytes of weights per chunk

// Calls body(context, chunk) for each chunk of [0, chunks) on at most ``threads`` threads. Throws std::bad_alloc if a
// body threw.
void run_chunks(int64_t chunks, int threads, void (*body)(const void *context, int64_t chunk), const void *context);

// Ends the workers after running calls. The next call with more than one thread starts them again.
void stop_threads();

// Calls body(from, to) for chunks of at least ``grain`` (except the last) that cover [0, count).
template <class Body>
void parallel_for(int64_t count, int64_t grain, int threads, const Body &body) {
  if (threads <= 1 || count <= grain) {
    if (count > 0) body(int64_t(0), count);
    return;
  }
  threads = std::min(threads, MOST_WORKERS + 1);
  const int64_t pieces = threads * CHUNKS_PER_THREAD, size = std::max(std::max<int64_t>(grain, 1), (count + pieces - 1) / pieces);
  struct Context {
    const Body &body;
    int64_t count, size;
  } const context{body, count, size};
  run_chunks((count + size - 1) / size, threads, [](const void *at, int64_t chunk) {
    const Context &c = *static_cast<const Context *>(at);
    c.body(chunk * c.size, std::min(c.count, (chunk + 1) * c.size));
  }, &context);
}
