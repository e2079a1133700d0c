#pragma once
// Moves the messages of one launch through the shared rings, and compares what each side says of
// them. All of a launch's messages move at once, as within an NCCL group.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/fake_gpu/nccl/segment.h"

namespace fake_nccl {

/// Goes before each message.
struct Header {
  char name[24];  // of the operation
  std::int32_t type;
  std::int32_t op;
  std::int32_t root;
  std::int32_t reserved;
  std::uint64_t count;
  std::uint64_t bytes;
};

struct Message {
  Lane lane = Lane::kPeer;
  int peer = 0;
  Header header{};
  std::byte* data = nullptr;
};

struct Operation {
  std::vector<Message> sends;
  std::vector<Message> receives;
  std::function<void()> start;   // before anything moves: the rank's own part
  std::function<void()> finish;  // when all is here: the sum
};

std::size_t type_bytes(ncclDataType_t type);
bool can_reduce(ncclDataType_t type, ncclRedOp_t op);
/// out = parts[0] op parts[1] op …, in this order, rounded after each step.
void reduce(ncclDataType_t type, ncclRedOp_t op, const std::vector<const std::byte*>& parts,
            std::size_t count, std::byte* out);

/// Runs the operations to their end. Throws Refusal: headers differ, a peer died. Returns false
/// where `aborted` became true first.
bool transfer(Membership& members, int rank, std::vector<Operation>& operations,
              const std::atomic<bool>& aborted);

}  // namespace fake_nccl
