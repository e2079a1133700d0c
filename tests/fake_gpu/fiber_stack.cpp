#include "tests/fake_gpu/fiber_stack.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Saves what the ABI says a call preserves, and changes the stack.
extern "C" void gatefold_fake_switch(void** save, void* load);
__asm__(R"(
.text
.p2align 4
.globl gatefold_fake_switch
.hidden gatefold_fake_switch
.type gatefold_fake_switch, @function
gatefold_fake_switch:
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
.size gatefold_fake_switch, .-gatefold_fake_switch
)");

namespace gatefold_fake {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t kStackBytes = 256 << 10;
constexpr std::size_t kEntryBytes = 4096;
#else
constexpr std::size_t kStackBytes = 64 << 10;
#endif
constexpr std::size_t kGuardBytes = 4096;

}  // namespace

FiberStack::FiberStack() {
  void* memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) {
    std::perror("FAKE GPU: a thread's stack");
    std::_Exit(71);
  }
  memory_ = static_cast<char*>(memory) + kGuardBytes;
#if defined(__SANITIZE_ADDRESS__)
  // There may have been a stack here whose fiber never came to its end.
  ASAN_UNPOISON_MEMORY_REGION(memory_, kStackBytes);
#endif
}

FiberStack::~FiberStack() { munmap(memory_ - kGuardBytes, kGuardBytes + kStackBytes); }

void FiberStack::start(void (*entry)()) {
#if defined(__SANITIZE_ADDRESS__)
  // An earlier fiber has left all functions but the first ones.
  ASAN_UNPOISON_MEMORY_REGION(memory_ + kStackBytes - kEntryBytes, kEntryBytes);
  fiber_shadow_ = nullptr;
#endif
  auto** top = reinterpret_cast<void**>(memory_ + kStackBytes);
  *--top = nullptr;  // entry() has no caller: a stack trace ends here
  *--top = reinterpret_cast<void*>(entry);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  fiber_pointer_ = top;
}

void FiberStack::enter() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_shadow_, memory_, kStackBytes);
#endif
  gatefold_fake_switch(&scheduler_pointer_, fiber_pointer_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_shadow_, nullptr, nullptr);
#endif
}

void FiberStack::entered() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber_shadow_, &scheduler_bottom_, &scheduler_size_);
#endif
}

void FiberStack::leave([[maybe_unused]] bool last) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(last ? nullptr : &fiber_shadow_, scheduler_bottom_,
                                 scheduler_size_);
#endif
  gatefold_fake_switch(&fiber_pointer_, scheduler_pointer_);
  entered();
}

}  // namespace gatefold_fake
