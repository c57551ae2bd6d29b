// What the kernels' libraries share.
#include "kernels.h"
#include "rows.h"

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
#endif

PrefetchSettings prefetch_settings;
std::tuple<QuantKernels<float>, QuantKernels<Bfloat16>, QuantKernels<Float16>> quant_kernels[KINDS];

void softcap(float *numbers, int64_t count, float cap) {
  for (int64_t i = 0; i < count; i += 16)
    store(numbers + i, first(count - i), capped(load(numbers + i, first(count - i)), cap));
}

void use_huge_pages(char *at, int64_t bytes) {  // 10 % faster to stream
#if defined(__linux__)
  const uintptr_t large = 1 << 21, start = (reinterpret_cast<uintptr_t>(at) + large - 1) / large * large;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(at) + bytes) / large * large;
  if (end > start) madvise(reinterpret_cast<void *>(start), end - start, MADV_HUGEPAGE);
#endif
}

Found prompt_lookup(const int64_t *text, int64_t length, const int64_t *max_guess, int64_t max_match, int64_t room, int64_t *out) {
  int64_t best = 0, after = length;
  for (int64_t end = length - 1; end > 0 && best < max_match; end--) {
    int64_t match = 0;
    while (match < max_match && match < end && text[end - 1 - match] == text[length - 1 - match]) match++;
    if (match > best) best = match, after = end;
  }
  const int64_t count = std::min({max_guess[best], room, length - after});
  std::copy(text + after, text + after + std::max<int64_t>(count, 0), out);
  return {best, std::max<int64_t>(count, 0)};
}
