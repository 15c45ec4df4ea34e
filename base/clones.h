// For files of hand-written loops: one source, compiled for several instruction sets.
//
//   DLO_INLINE float Square(float x) { return x * x; }
//   DLO_CLONES void SquareAll(const float* from, int64_t n, float* to) { ... Square(from[i]) ... }
#pragma once

// Each function so marked is compiled for these instruction sets; the loader picks the best that
// the machine has. Levels of the x86-64 ABI, not processor names: names would match one vendor
// only. Not with a sanitizer: its calls in the choosing function would come before it is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(DLO_SANITIZED)
#define DLO_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DLO_CLONES
#endif
// Helpers must be inlined into the clones to be compiled for their instruction set.
#define DLO_INLINE inline __attribute__((always_inline))
