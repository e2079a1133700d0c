#include "parallel/agreement.h"

#include <fmt/format.h>

#include <chrono>
#include <exception>
#include <new>
#include <optional>
#include <vector>

namespace gatefold {
namespace {

struct Status {
  int code = 0;
  std::int64_t message_bytes = 0;
};

struct Failure {
  ExitCode code;
  std::string message;
};

std::optional<Failure> attempt(const std::function<void()>& step) {
  try {
    step();
  } catch (const NoAnswerError&) {
    throw;  // not another wait for who is lost
  } catch (const Error& error) {
    return Failure{error.code(), error.what()};
  } catch (const std::bad_alloc&) {
    return Failure{ExitCode::kOutOfMemory, "out of memory; use more ranks or fewer tokens"};
  } catch (const std::exception& error) {  // or the peers would wait for this rank
    return Failure{ExitCode::kBackend, fmt::format("unexpected error ({})", error.what())};
  }
  return std::nullopt;
}

std::string broadcast_text(Communicator& comm, std::string text, std::int64_t bytes, int root) {
  text.resize(static_cast<std::size_t>(bytes));
  comm.host().broadcast(reinterpret_cast<std::byte*>(text.data()), bytes, root);
  return text;
}

/// The lowest rank that failed, but one that only waited in vain for another comes last; -1: none.
int first_failed(const std::vector<Status>& all) {
  int waited = -1;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].code == 0) continue;
    if (all[rank].code != static_cast<int>(ExitCode::kTimeout)) return static_cast<int>(rank);
    if (waited < 0) waited = static_cast<int>(rank);
  }
  return waited;
}

/// Throws the first failed rank's failure on all ranks.
void agree(Communicator& comm, const std::optional<Failure>& mine) {
  std::vector<Status> all(static_cast<std::size_t>(comm.size()));
  Status& own = all[static_cast<std::size_t>(comm.rank())];
  if (mine) own = {static_cast<int>(mine->code), static_cast<std::int64_t>(mine->message.size())};
  all_gather<Status>(comm, all);
  const int rank = first_failed(all);
  if (rank < 0) return;
  const Status status = all[static_cast<std::size_t>(rank)];
  std::string text = rank == comm.rank() ? mine->message : "";
  text = broadcast_text(comm, std::move(text), status.message_bytes, rank);
  const bool named = comm.size() == 1 || text.starts_with("rank ");
  throw AgreedError(static_cast<ExitCode>(status.code),
                    named ? text : fmt::format("rank {}: {}", comm.host().world_rank(rank), text));
}

}  // namespace

void run_agreed(Communicator& comm, const std::function<void()>& step) {
  agree(comm, attempt(step));
}

void require_equal(Communicator& comm, const std::string& name, const std::string& value,
                   ExitCode code) {
  std::int64_t bytes = static_cast<std::int64_t>(value.size());
  comm.host().broadcast(reinterpret_cast<std::byte*>(&bytes), sizeof(bytes), 0);
  const std::string first = broadcast_text(comm, comm.rank() == 0 ? value : "", bytes, 0);
  run_agreed(comm, [&] {
    if (value == first) return;
    throw Error(code,
                fmt::format("rank {} has {} {}, rank {} has {} (all ranks must have the same); "
                            "start all ranks with the same arguments and files",
                            comm.host().world_rank(comm.rank()), name, value,
                            comm.host().world_rank(0), first));
  });
}

bool all_true(Communicator& comm, bool mine) {
  std::vector<std::uint8_t> all(static_cast<std::size_t>(comm.size()));
  all[static_cast<std::size_t>(comm.rank())] = mine ? 1 : 0;
  all_gather<std::uint8_t>(comm, all);
  for (const std::uint8_t one : all) {
    if (one == 0) return false;
  }
  return true;
}

namespace {

constexpr std::byte kWorking{1};
constexpr std::byte kDone{0};

void tell_peers(Communicator& comm, std::byte sign) {
  std::vector<Transfer> sends;
  for (int peer = 0; peer < comm.size(); ++peer) {
    if (peer != comm.rank()) sends.push_back({peer, &sign, 1});
  }
  comm.host().exchange(sends, {});
}

void sleep_until_done(Communicator& comm, int root) {
  std::byte sign = kWorking;
  while (sign == kWorking) {
    const Transfer receive{root, &sign, 1};
    comm.host().exchange({}, {&receive, 1});
  }
}

}  // namespace

void while_root_works(Communicator& comm, int root,
                      const std::function<void(const std::function<void()>&)>& work) {
  using Clock = std::chrono::steady_clock;
  std::optional<Failure> failure;
  if (comm.rank() == root) {
    auto last = Clock::now();
    const auto beat = [&] {
      comm.progress().tick();
      if (Clock::now() - last < std::chrono::seconds(1)) return;
      last = Clock::now();
      tell_peers(comm, kWorking);
    };
    failure = attempt([&] { work(beat); });
    tell_peers(comm, kDone);
  } else {
    sleep_until_done(comm, root);
  }
  agree(comm, failure);
}

}  // namespace gatefold
