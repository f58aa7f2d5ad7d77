// SPDX-License-Identifier: Apache-2.0
// Fibers: functions with stacks of their own, of which one runs at a time. A run of the emulator changes between them
// millions of times.
#pragma once

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include <cstddef>

namespace tessera::emulator {

// Where a function goes on that does not run.
class Fiber {
 public:
  // The first switch to this fiber calls start(), which never returns.
  void prepare(void* stack, std::size_t stack_bytes, void (*start)());

  // Leaves `from`, which runs, and goes on where `to` left.
  static void change(Fiber& from, Fiber& to);

 private:
#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;  // on the stack lie the registers that a call preserves
#else
  ucontext_t context_;
#endif
};

}  // namespace tessera::emulator
