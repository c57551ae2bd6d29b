// Threads of our own. ``parallel_for`` cuts a range into chunks; the calling thread begins at once, workers help. A
// thread takes the chunks of its own segment first, the same in every call, so that weights stay in its cache; then
// what others have not begun. No call waits for a thread that has taken nothing, so a busy machine delays a call by a
// chunk at most. What a chunk computes must not depend on the thread that takes it, nor on the chunks' size.
#pragma once
#include <algorithm>
#include <cstdint>

constexpr int MOST_WORKERS = 255;          // beside the calling thread
constexpr int64_t CHUNKS_PER_THREAD = 16;  // at most, in a segment
constexpr int64_t GRAIN = 1 << 15;         // bytes of weights that a chunk reads at least

// Calls body(context, chunk) once for each chunk of [0, chunks), on at most ``threads`` threads. Throws std::bad_alloc
// if a body threw anything.
void run_chunks(int64_t chunks, int threads, void (*body)(const void *context, int64_t chunk), const void *context);

// Ends the workers; the next call with more than one thread starts them again. Waits for calls under way.
void stop_threads();

// Calls body(from, to) for chunks that cover [0, count), each of at least ``grain`` but perhaps the last.
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
