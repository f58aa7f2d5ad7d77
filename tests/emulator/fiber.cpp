// SPDX-License-Identifier: Apache-2.0
// On x86-64 by hand: swapcontext() has the kernel set the signal mask, which took three quarters of the emulator's
// time.
#include "tests/emulator/fiber.hpp"

#include <cstdint>

namespace tessera::emulator {

#if defined(__x86_64__)

extern "C" void tessera_change_fiber(void** from, void* to);

// What a call preserves goes on the stack that is left, and comes from the one that is taken.
asm(R"(
  .text
  .type tessera_change_fiber, @function
tessera_change_fiber:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size tessera_change_fiber, . - tessera_change_fiber
)");

void Fiber::prepare(void* stack, std::size_t stack_bytes, void (*start)()) {
  constexpr int kPreserved = 6;
  auto const end = reinterpret_cast<std::uintptr_t>(stack) + stack_bytes & ~std::uintptr_t{15};
  // A function begins 8 bytes behind a multiple of 16, on the address that it returns to: here none.
  auto* top = reinterpret_cast<std::uintptr_t*>(end) - 1;
  *top = 0;
  *--top = reinterpret_cast<std::uintptr_t>(start);
  for (int i = 0; i < kPreserved; ++i) *--top = 0;
  stack_pointer_ = top;
}

void Fiber::change(Fiber& from, Fiber& to) {
  tessera_change_fiber(&from.stack_pointer_, to.stack_pointer_);
}

#else

void Fiber::prepare(void* stack, std::size_t stack_bytes, void (*start)()) {
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack;
  context_.uc_stack.ss_size = stack_bytes;
  context_.uc_link = nullptr;
  makecontext(&context_, start, 0);
}

void Fiber::change(Fiber& from, Fiber& to) { swapcontext(&from.context_, &to.context_); }

#endif

}  // namespace tessera::emulator
