#include "tests/faults/mishap.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <stdexcept>
#include <string_view>
#include <thread>

namespace gatefold {

bool is_mishap(const Fault& fault) {
  constexpr std::array<std::string_view, 7> kNames{"kill",  "stop",  "segfault", "exit",
                                                   "throw", "sleep", "linger"};
  return std::find(kNames.begin(), kNames.end(), fault.name) != kNames.end();
}

void happen(const Fault& fault) {
  std::fprintf(stderr, "[rank %d] planted: %s@%s\n", fault.rank, fault.name.c_str(),
               fault.point.c_str());
  if (fault.is("kill")) std::raise(SIGKILL);
  if (fault.is("stop")) std::raise(SIGSTOP);
  if (fault.is("segfault")) std::raise(SIGSEGV);
  if (fault.is("exit")) _exit(0);
  if (fault.is("throw")) throw std::runtime_error("a planted exception");
  if (fault.is("sleep")) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  if (fault.is("linger")) std::this_thread::sleep_for(std::chrono::seconds(30));
}

}  // namespace gatefold
