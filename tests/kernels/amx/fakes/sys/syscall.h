// A system that grants or refuses the tiles' registers as the environment says; its other calls are the real ones.
#pragma once

#include_next <sys/syscall.h>

#include <unistd.h>

#include <cstdlib>

template <class... More>
static long answer(long number, More... more) {
  if (number == SYS_arch_prctl) return std::getenv("TILES_GRANTED") ? 0 : -1;
  return syscall(number, more...);
}
#define syscall answer
