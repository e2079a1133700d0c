#include "tests/fake_gpu/fibers.h"

#include <link.h>

#include <array>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <vector>

#include "tests/fake_gpu/fiber_stack.h"

extern "C" void* __tls_get_addr(void*);

namespace gatefold_fake {
namespace {

constexpr unsigned kLanes = 32;
constexpr std::byte kPoison{0xFF};
constexpr std::byte kGuard{0xA5};
#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t kGuardBytes = 0;  // the sanitizer has its own, which it looks at always
#else
constexpr std::size_t kGuardBytes = 64;
#endif

enum class State { kReady, kAtBlockBarrier, kAtWarpBarrier, kEnded };

struct Place {
  const char* file = "";
  int line = 0;
  FakeVote vote = FakeVote::kNone;

  bool operator==(const Place& other) const {
    return line == other.line && vote == other.vote && std::strcmp(file, other.file) == 0;
  }
  std::string text() const { return std::string(file) + ":" + std::to_string(line); }
};

struct Fiber {
  FakeThread thread{};
  std::unique_ptr<FiberStack> stack;  // while it has begun and not ended
  State state = State::kReady;
  Place place;
  int predicate = 0;
  unsigned mask = 0;
  std::uint64_t value = 0;
  std::uint64_t* values = nullptr;  // [32], its own
  unsigned came = 0;
};

std::string name(const dim3& at) {
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), "(%u,%u,%u)", at.x, at.y, at.z);
  return text.data();
}
std::string name(const uint3& at) { return name(dim3(at.x, at.y, at.z)); }

/// 0 … count - 1, each once, in an order that the seed decides.
class Order {
 public:
  Order(std::uint64_t seed, std::uint64_t count) : count_(count) {
    const auto next = [&] { return seed = seed * 6364136223846793005U + 1442695040888963407U; };
    step_ = (next() >> 33) % count;
    while (std::gcd(step_, count) != 1) step_ = (step_ + 1) % count;
    at_ = (next() >> 33) % count;
  }
  std::uint64_t next() {
    const std::uint64_t result = at_;
    at_ = (at_ + step_) % count_;
    return result;
  }

 private:
  std::uint64_t count_;
  std::uint64_t step_ = 0;
  std::uint64_t at_ = 0;
};

/// The static __shared__ variables of the library that has the kernel: all of its thread-local
/// ones.
struct SharedVariables {
  ElfW(Addr) code = 0;  // in
  void* begin = nullptr;
  std::size_t bytes = 0;

  static SharedVariables around(const void* function) {
    SharedVariables result;
    result.code = reinterpret_cast<ElfW(Addr)>(function);
    dl_iterate_phdr(&SharedVariables::look, &result);
    return result;
  }

 private:
  static int look(dl_phdr_info* info, std::size_t, void* data) {
    auto& result = *static_cast<SharedVariables*>(data);
    const ElfW(Phdr)* variables = nullptr;
    bool here = false;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const ElfW(Phdr)& part = info->dlpi_phdr[i];
      const auto start = info->dlpi_addr + part.p_vaddr;
      if (part.p_type == PT_LOAD) {
        here = here || (result.code >= start && result.code < start + part.p_memsz);
      }
      if (part.p_type == PT_TLS) variables = &part;
    }
    if (!here) return 0;
    if (variables != nullptr && info->dlpi_tls_modid != 0) {
      std::array<std::size_t, 2> index{info->dlpi_tls_modid, 0};
      result.begin = __tls_get_addr(index.data());
      result.bytes = variables->p_memsz;
    }
    return 1;
  }
};

class Block {
 public:
  explicit Block(const Launch& launch);

  std::string run(const dim3& index);

  // Called on fibers.
  const FakeThread& thread() const { return running_->thread; }
  void* dynamic_shared() const { return dynamic_.get(); }
  int block_barrier(const Place& place, int predicate);
  unsigned warp_barrier(const Place& place, unsigned mask, std::uint64_t value,
                        std::uint64_t* values);
  [[noreturn]] void trap(const std::string& why);

  static thread_local Block* current;

 private:
  static void entry();
  void wait(State state);
  void prepare(const dim3& index);
  void poison();
  void resume(unsigned index);
  void wake_in_some_order(const std::vector<unsigned>& woken);
  void open_block_barrier();
  void try_warp(unsigned warp);
  std::vector<unsigned> shuffled(std::size_t count);
  std::string stuck() const;
  std::string who(const Fiber& fiber) const;
  bool guards_whole() const;
  void fail(const std::string& why) {
    if (failure_.empty()) failure_ = why;
  }

  const Launch& launch_;
  std::uint64_t random_;
  const SharedVariables shared_;
  std::vector<Fiber> fibers_;
  std::deque<unsigned> ready_;
  std::unique_ptr<std::byte, decltype(&std::free)> dynamic_;
  Fiber* running_ = nullptr;
  unsigned at_barrier_ = 0;
  unsigned at_warp_barriers_ = 0;
  unsigned ended_ = 0;
  int vote_ = 0;
  std::string failure_;
};

thread_local Block* Block::current = nullptr;
thread_local std::vector<std::unique_ptr<FiberStack>> free_stacks;

Block::Block(const Launch& launch)
    : launch_(launch),
      random_(launch.seed),
      shared_(SharedVariables::around(reinterpret_cast<const void*>(launch.kernel->run))),
      fibers_(launch.block.x * launch.block.y * launch.block.z),
      dynamic_(nullptr, &std::free) {
  void* memory = nullptr;
  const std::size_t bytes = launch.dynamic_shared + kGuardBytes;
  if (posix_memalign(&memory, 1024, bytes > 0 ? bytes : 1) != 0) std::abort();
  dynamic_.reset(static_cast<std::byte*>(memory));
}

std::vector<unsigned> Block::shuffled(std::size_t count) {
  Order order(random_++, count);
  std::vector<unsigned> indices(count);
  for (unsigned& index : indices) index = static_cast<unsigned>(order.next());
  return indices;
}

void Block::wake_in_some_order(const std::vector<unsigned>& woken) {
  for (const unsigned i : shuffled(woken.size())) {
    if (fibers_[woken[i]].state == State::kAtWarpBarrier) --at_warp_barriers_;
    fibers_[woken[i]].state = State::kReady;
    ready_.push_back(woken[i]);
  }
}

void Block::poison() {
  if (shared_.bytes > 0) std::memset(shared_.begin, static_cast<int>(kPoison), shared_.bytes);
  std::memset(dynamic_.get(), static_cast<int>(kPoison), launch_.dynamic_shared);
  std::memset(dynamic_.get() + launch_.dynamic_shared, static_cast<int>(kGuard), kGuardBytes);
}

bool Block::guards_whole() const {
  for (std::size_t i = 0; i < kGuardBytes; ++i) {
    if (dynamic_.get()[launch_.dynamic_shared + i] != kGuard) return false;
  }
  return true;
}

void Block::prepare(const dim3& index) {
  unsigned i = 0;
  for (unsigned z = 0; z < launch_.block.z; ++z) {
    for (unsigned y = 0; y < launch_.block.y; ++y) {
      for (unsigned x = 0; x < launch_.block.x; ++x, ++i) {
        Fiber& fiber = fibers_[i];
        fiber.thread = {
            {x, y, z}, {index.x, index.y, index.z}, launch_.block, launch_.grid, i % kLanes};
        fiber.state = State::kReady;
      }
    }
  }
  const auto order = shuffled(fibers_.size());
  ready_.assign(order.begin(), order.end());
  at_barrier_ = 0;
  at_warp_barriers_ = 0;
  ended_ = 0;
}

std::string Block::run(const dim3& index) {
  prepare(index);
  poison();
  current = this;
  while (failure_.empty() && !ready_.empty()) {
    const unsigned next = ready_.front();
    ready_.pop_front();
    resume(next);
  }
  current = nullptr;
  if (failure_.empty() && ended_ < fibers_.size()) failure_ = stuck();
  if (failure_.empty() && !guards_whole()) {
    failure_ = "wrote past its " + std::to_string(launch_.dynamic_shared) +
               " bytes of dynamic shared memory in block " + name(index);
  }
  return failure_;
}

void Block::resume(unsigned index) {
  Fiber& fiber = fibers_[index];
  if (fiber.stack == nullptr) {
    if (free_stacks.empty()) free_stacks.push_back(std::make_unique<FiberStack>());
    fiber.stack = std::move(free_stacks.back());
    free_stacks.pop_back();
    fiber.stack->start(&Block::entry);
  }
  running_ = &fiber;
  fiber.stack->enter();
  running_ = nullptr;
  if (fiber.state != State::kEnded) return;
  free_stacks.push_back(std::move(fiber.stack));
  ++ended_;
  try_warp(index / kLanes);  // others may have waited for this one
}

void Block::entry() {
  Fiber& fiber = *current->running_;
  fiber.stack->entered();
  current->launch_.kernel->run(current->launch_.arguments);
  fiber.state = State::kEnded;
  fiber.stack->leave(true);
  std::abort();  // not reached
}

void Block::wait(State state) {
  Fiber& fiber = *running_;
  fiber.state = state;
  if (state == State::kAtBlockBarrier && ++at_barrier_ == fibers_.size()) open_block_barrier();
  if (state == State::kAtWarpBarrier) {
    ++at_warp_barriers_;
    try_warp(static_cast<unsigned>(&fiber - fibers_.data()) / kLanes);
  }
  fiber.stack->leave(false);
}

int Block::block_barrier(const Place& place, int predicate) {
  running_->place = place;
  running_->predicate = predicate;
  wait(State::kAtBlockBarrier);
  return vote_;
}

void Block::open_block_barrier() {
  at_barrier_ = 0;
  int yes = 0;
  for (const Fiber& fiber : fibers_) {
    yes += fiber.predicate;
    if (fiber.place == fibers_[0].place) continue;
    fail("divergent barrier: " + who(fibers_[0]) + ", " + who(fiber));
    return;
  }
  const auto threads = static_cast<int>(fibers_.size());
  switch (fibers_[0].place.vote) {
    case FakeVote::kNone: vote_ = 0; break;
    case FakeVote::kCount: vote_ = yes; break;
    case FakeVote::kAnd: vote_ = yes == threads ? 1 : 0; break;
    case FakeVote::kOr: vote_ = yes > 0 ? 1 : 0; break;
  }
  std::vector<unsigned> everyone(fibers_.size());
  std::iota(everyone.begin(), everyone.end(), 0U);
  wake_in_some_order(everyone);
}

unsigned Block::warp_barrier(const Place& place, unsigned mask, std::uint64_t value,
                             std::uint64_t* values) {
  Fiber& self = *running_;
  if ((mask >> self.thread.lane & 1U) == 0) {
    self.place = place;
    trap("warp barrier at " + place.text() + ": the mask leaves out the calling lane");
  }
  self.place = place;
  self.mask = mask;
  self.value = value;
  self.values = values;
  wait(State::kAtWarpBarrier);
  return self.came;
}

/// Opens each barrier of the warp at which all lanes of the mask are, but those that have ended.
void Block::try_warp(unsigned warp) {
  if (at_warp_barriers_ == 0) return;
  const unsigned first = warp * kLanes;
  const auto count = std::min<unsigned>(kLanes, static_cast<unsigned>(fibers_.size()) - first);
  unsigned alive = 0;
  for (unsigned lane = 0; lane < count; ++lane) {
    if (fibers_[first + lane].state != State::kEnded) alive |= 1U << lane;
  }
  for (unsigned lane = 0; lane < count; ++lane) {
    const Fiber& asking = fibers_[first + lane];
    if (asking.state != State::kAtWarpBarrier) continue;
    const unsigned needed = asking.mask & alive;
    std::vector<unsigned> lanes;
    for (unsigned rest = needed; rest != 0; rest &= rest - 1) {
      const auto index = first + static_cast<unsigned>(std::countr_zero(rest));
      const Fiber& other = fibers_[index];
      if (other.state != State::kAtWarpBarrier) break;
      if (other.mask != asking.mask || !(other.place == asking.place)) {
        fail("divergent warp barrier: " + who(asking) + ", " + who(other));
        return;
      }
      lanes.push_back(index);
    }
    if (static_cast<int>(lanes.size()) < std::popcount(needed)) continue;
    for (const unsigned to : lanes) {
      for (const unsigned from : lanes) fibers_[to].values[from - first] = fibers_[from].value;
      fibers_[to].came = needed;
    }
    wake_in_some_order(lanes);
  }
}

void Block::trap(const std::string& why) {
  fail(why + " in " + who(*running_));
  running_->stack->leave(false);
  std::abort();  // not reached: a failed block runs no fiber again
}

std::string Block::who(const Fiber& fiber) const {
  const std::string thread =
      "thread " + name(fiber.thread.thread) + " of block " + name(fiber.thread.block);
  switch (fiber.state) {
    case State::kEnded: return thread + " has ended";
    case State::kReady: return thread;
    case State::kAtBlockBarrier: return thread + " waits at " + fiber.place.text();
    case State::kAtWarpBarrier: break;
  }
  return thread + " waits for its warp at " + fiber.place.text();
}

std::string Block::stuck() const {
  const Fiber* waiting = nullptr;
  for (const Fiber& fiber : fibers_) {
    if (waiting == nullptr && fiber.state != State::kEnded) waiting = &fiber;
  }
  for (const Fiber& fiber : fibers_) {
    if (fiber.state != waiting->state || !(fiber.place == waiting->place)) {
      return "divergent barrier: " + who(*waiting) + ", " + who(fiber);
    }
  }
  return "divergent barrier: " + who(*waiting);
}

}  // namespace

std::string run_grid(const Launch& launch) {
  Block block(launch);
  const dim3& grid = launch.grid;
  const std::uint64_t blocks = std::uint64_t{grid.x} * grid.y * grid.z;
  Order order(launch.seed, blocks);
  for (std::uint64_t i = 0; i < blocks; ++i) {
    const std::uint64_t at = order.next();
    std::string failure =
        block.run({static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
                   static_cast<unsigned>(at / grid.x / grid.y)});
    if (!failure.empty()) return failure;
  }
  return "";
}

}  // namespace gatefold_fake

using gatefold_fake::Block;

const FakeThread* cudaFakeThread() { return &Block::current->thread(); }
void* cudaFakeDynamicShared() { return Block::current->dynamic_shared(); }
int cudaFakeBlockBarrier(FakeVote vote, int predicate, const char* file, int line) {
  return Block::current->block_barrier({file, line, vote}, predicate);
}
unsigned cudaFakeWarpBarrier(unsigned mask, std::uint64_t value, std::uint64_t values[32],
                             const char* file, int line) {
  return Block::current->warp_barrier({file, line, FakeVote::kNone}, mask, value, values);
}
void cudaFakeTrap(const char* why, const char* file, int line) {
  Block::current->trap(std::string(why) + " at " + file + ":" + std::to_string(line));
}
