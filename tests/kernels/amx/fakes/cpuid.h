// A CPU that has everything, and a system that saves every register.
#pragma once

static inline int __get_cpuid_count(unsigned, unsigned, unsigned* a, unsigned* b, unsigned* c, unsigned* d) {
  *a = *b = *c = *d = ~0u;
  return 1;
}
#define asm(...) (low = ~0u, high = ~0u)
