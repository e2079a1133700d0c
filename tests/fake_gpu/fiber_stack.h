#pragma once

#include <cstddef>

// Stacks, and the switch between them. A switch is a few instructions: ucontext's has a system
// call, and a kernel switches millions of times.

namespace gatefold_fake {

class FiberStack {
 public:
  FiberStack();
  ~FiberStack();
  FiberStack(const FiberStack&) = delete;
  FiberStack& operator=(const FiberStack&) = delete;

  /// The next switch to `this` begins in entry(), which must never return.
  void start(void (*entry)());
  /// From the scheduler: runs the fiber until it calls leave().
  void enter();
  /// From the fiber: back to enter(). `last`: the fiber won't be entered again but by start().
  void leave(bool last);
  /// The first thing that entry() does.
  void entered();

 private:
  char* memory_ = nullptr;
  void* fiber_pointer_ = nullptr;
  void* scheduler_pointer_ = nullptr;
  // What AddressSanitizer must know of a switch.
  void* fiber_shadow_ = nullptr;
  void* scheduler_shadow_ = nullptr;
  const void* scheduler_bottom_ = nullptr;
  std::size_t scheduler_size_ = 0;
};

}  // namespace gatefold_fake
