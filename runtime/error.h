#pragma once

#include <stdexcept>
#include <string>

namespace gatefold {

/// What a process ends with. Below 126, because launchers report codes modulo 256.
enum class ExitCode : int {
  kOk = 0,
  kVerificationFailed = 1,
  kUsage = 64,        // flags, and flags against the model
  kData = 65,         // anything wrong inside a file
  kNoInput = 66,      // a path that can't be opened
  kUnavailable = 69,  // no usable device or library
  kBackend = 70,      // an MPI, oneDNN, CUDA or NCCL call failed
  kOutOfMemory = 71,
  kOutput = 74,
  kTimeout = 75,  // deadline passed, or a peer was lost
};

/// Plus a signal's number: what a process ends with that a signal ended, as shells have it.
constexpr int kSignalled = 128;

/// The one exception type. Message grammar: problem (why it is one); what to do.
class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ExitCode code() const noexcept { return code_; }

 private:
  ExitCode code_;
};

}  // namespace gatefold
