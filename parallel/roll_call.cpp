#include "parallel/roll_call.h"

#include <unistd.h>

#include <chrono>

#include "parallel/mpi_check.h"

namespace gatefold {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kCallTag = 1;
constexpr int kHereTag = 2;

/// Messages are empty, so no memory has to last until they are gone.
void send(MPI_Comm comm, int peer, int tag) {
  MPI_Request request = MPI_REQUEST_NULL;
  if (MPI_Isend(nullptr, 0, MPI_BYTE, peer, tag, comm, &request) == MPI_SUCCESS) {
    MPI_Request_free(&request);
  }
}

/// A failed one is no answer either.
bool answered(const MPI_Request& request) {
  int done = 0;
  return MPI_Request_get_status(request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done != 0;
}

}  // namespace

void RollCall::begin() {
  const std::lock_guard lock(mutex_);
  MPI_Comm own = MPI_COMM_NULL;
  check(MPI_Comm_dup(MPI_COMM_WORLD, &own), "MPI_Comm_dup");
  check(MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check(MPI_Comm_rank(own, &rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(own, &size_), "MPI_Comm_size");
  comm_ = own;
}

void RollCall::end() {
  const std::lock_guard lock(mutex_);
  comm_ = MPI_COMM_NULL;  // not freed: that is collective, and peers may be lost
}

void RollCall::answer() {
  const std::unique_lock lock(mutex_, std::try_to_lock);  // missing() answers, too
  if (lock) answer_all();
}

/// Errors are silence, which the peer takes for what it is.
void RollCall::answer_all() const {
  if (comm_ == MPI_COMM_NULL || size_ == 1) return;
  for (;;) {
    int called = 0;
    MPI_Status status;
    if (MPI_Iprobe(MPI_ANY_SOURCE, kCallTag, comm_, &called, &status) != MPI_SUCCESS) return;
    if (called == 0) return;
    const int peer = status.MPI_SOURCE;
    if (MPI_Recv(nullptr, 0, MPI_BYTE, peer, kCallTag, comm_, MPI_STATUS_IGNORE) != MPI_SUCCESS) {
      return;
    }
    send(comm_, peer, kHereTag);
  }
}

std::vector<int> RollCall::missing(const std::function<bool()>& enough) {
  const std::lock_guard lock(mutex_);
  if (comm_ == MPI_COMM_NULL) return {};
  std::vector<MPI_Request> answers;
  for (int peer = 0; peer < size_; ++peer) {
    MPI_Request& request = answers.emplace_back(MPI_REQUEST_NULL);  // of this rank: at once
    if (peer == rank_) continue;
    MPI_Irecv(nullptr, 0, MPI_BYTE, peer, kHereTag, comm_, &request);
    send(comm_, peer, kCallTag);
  }
  std::vector<int> silent;
  const auto start = Clock::now();
  do {
    usleep(1000);
    answer_all();
    silent.clear();
    for (int peer = 0; peer < size_; ++peer) {
      if (!answered(answers[static_cast<std::size_t>(peer)])) silent.push_back(peer);
    }
    if (enough && enough()) silent.clear();
  } while (!silent.empty() && Clock::now() - start < kPatience);
  for (MPI_Request& request : answers) {
    if (request == MPI_REQUEST_NULL) continue;
    MPI_Cancel(&request);
    MPI_Request_free(&request);
  }
  return silent;
}

}  // namespace gatefold
