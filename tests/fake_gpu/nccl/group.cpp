// The calls that move data, alone and in groups.
#include <cstring>
#include <map>
#include <set>

#include "tests/fake_gpu/fake_cudart.h"
#include "tests/fake_gpu/nccl/comm.h"

namespace fake_nccl {
namespace {

struct Call {
  const char* name;
  ncclComm_t comm;
  cudaStream_t stream;
  ncclDataType_t type;
  std::size_t count;
  int root = -1;  // or the peer
  int op = -1;

  std::size_t bytes() const { return count * type_bytes(type); }
};

struct SelfPiece {
  std::byte* data;
  std::size_t bytes;
  bool send;
};

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<ncclComm_t> order;
  std::map<ncclComm_t, std::unique_ptr<Launch>> launches;
  std::map<ncclComm_t, std::vector<SelfPiece>> own;
};

thread_local Group group;

void require_device_memory(const Call& call, const void* data, std::size_t bytes) {
  const Core& core = *call.comm->core;
  if (bytes == 0) return;
  if (cudaFakeIsDeviceRange(data, bytes) != 0 && cudaFakeDeviceOf(data) == core.device) return;
  throw Refusal{ncclInvalidArgument,
                std::string(call.name) + " of rank " + std::to_string(core.rank) + ": its " +
                    std::to_string(bytes) + " bytes are not all in memory of its device"};
}

void require_valid(const Call& call) {
  if (call.comm == nullptr) throw Refusal{ncclInvalidArgument, "no communicator"};
  require_ready(*call.comm->core);
  if (type_bytes(call.type) == 0) throw Refusal{ncclInvalidArgument, "no such type"};
  if (call.root < -1 || call.root >= call.comm->core->size) {
    throw Refusal{ncclInvalidArgument,
                  std::string(call.name) + ": no rank " + std::to_string(call.root)};
  }
  if (call.op >= 0 && !can_reduce(call.type, static_cast<ncclRedOp_t>(call.op))) {
    throw Refusal{ncclInvalidUsage, "this stand-in reduces no type " + std::to_string(call.type) +
                                        " by op " + std::to_string(call.op)};
  }
}

/// What the rank sends to and takes from each peer; nullptr and 0 where nothing.
struct Share {
  const std::byte* send = nullptr;
  std::size_t send_bytes = 0;
  std::byte* receive = nullptr;
  std::size_t receive_bytes = 0;
};

Message message(const Call& call, Lane lane, int peer, const std::byte* data, std::size_t bytes) {
  Message m;
  m.lane = lane;
  m.peer = peer;
  m.data = const_cast<std::byte*>(data);
  std::strncpy(m.header.name, lane == Lane::kPeer ? "a message" : call.name,
               sizeof(m.header.name) - 1);
  m.header.type = call.type;
  m.header.op = call.op;
  m.header.root = lane == Lane::kPeer ? -1 : call.root;
  m.header.count = call.count;
  m.header.bytes = bytes;
  return m;
}

Launch& launch_of(const Call& call) {
  std::unique_ptr<Launch>& launch = group.launches[call.comm];
  if (launch == nullptr) {
    launch = std::make_unique<Launch>();
    launch->core = call.comm->core;
    launch->stream = call.stream;
    group.order.push_back(call.comm);
  }
  if (launch->stream != call.stream) {
    throw Refusal{ncclInvalidUsage, "this stand-in wants one stream per group and communicator"};
  }
  return *launch;
}

/// Every rank hears from every other, so that all see a mismatch.
Operation operation_of(const Call& call, const std::vector<Share>& shares) {
  Operation operation;
  const int rank = call.comm->core->rank;
  for (int r = 0; r < call.comm->core->size; ++r) {
    const Share& share = shares[static_cast<std::size_t>(r)];
    if (r == rank) continue;
    operation.sends.push_back(message(call, Lane::kCollective, r, share.send, share.send_bytes));
    operation.receives.push_back(
        message(call, Lane::kCollective, r, share.receive, share.receive_bytes));
  }
  const Share own = shares[static_cast<std::size_t>(rank)];
  operation.start = [own] {
    if (own.send_bytes == 0 || own.send == own.receive) return;
    std::memmove(own.receive, own.send, own.send_bytes);
  };
  return operation;
}

ncclResult_t end_group();

/// Adds an operation to the thread's group, or to one of its own.
template <typename Make>
ncclResult_t add(const Call& call, const Make& make) {
  ++group.depth;
  try {
    require_valid(call);
    const Inside inside(*call.comm->core);
    make();
  } catch (const Refusal& refusal) {
    group.error = report(refusal);
  }
  const ncclResult_t error = group.error;
  return group.depth == 1 ? end_group() : (--group.depth, error);
}

/// Messages of a rank to itself match in order, and within a group only.
void pair_own_pieces(Launch& launch, const std::vector<SelfPiece>& pieces) {
  std::vector<SelfPiece> sends;
  std::vector<SelfPiece> receives;
  for (const SelfPiece& piece : pieces) (piece.send ? sends : receives).push_back(piece);
  bool equal = sends.size() == receives.size();
  for (std::size_t i = 0; equal && i < sends.size(); ++i) {
    equal = sends[i].bytes == receives[i].bytes;
  }
  const int rank = launch.core->rank;
  if (!equal) {
    throw Refusal{ncclInvalidUsage, "rank " + std::to_string(rank) + " and rank " +
                                        std::to_string(rank) +
                                        ": a group's sends to itself and receives differ"};
  }
  Operation operation;
  operation.start = [sends, receives] {
    for (std::size_t i = 0; i < sends.size(); ++i) {
      std::memmove(receives[i].data, sends[i].data, sends[i].bytes);
    }
  };
  launch.operations.push_back(std::move(operation));
}

ncclResult_t end_group() {
  Group ended;
  std::swap(ended, group);
  ncclResult_t result = ended.error;
  for (ncclComm_t comm : ended.order) {
    if (ended.error != ncclSuccess) break;
    const Inside inside(*comm->core);
    try {
      std::unique_ptr<Launch>& launch = ended.launches[comm];
      pair_own_pieces(*launch, ended.own[comm]);
      const ncclResult_t given = give(std::move(launch));
      if (given != ncclSuccess) result = given;
    } catch (const Refusal& refusal) {
      result = ended.error = report(refusal);
      comm->core->set(refusal.code, refusal.why);
    }
  }
  return result;
}

ncclResult_t peer_call(const Call& call, const void* data, bool send) {
  return add(call, [&] {
    require_device_memory(call, data, call.bytes());
    auto* bytes = static_cast<std::byte*>(const_cast<void*>(data));
    Launch& launch = launch_of(call);
    if (call.root == call.comm->core->rank) {
      group.own[call.comm].push_back({bytes, call.bytes(), send});
      return;
    }
    Operation operation;
    (send ? operation.sends : operation.receives)
        .push_back(message(call, Lane::kPeer, call.root, bytes, call.bytes()));
    launch.operations.push_back(std::move(operation));
  });
}

/// share(r): what this rank sends to and takes from rank r.
template <typename ShareOf>
ncclResult_t moving_call(const Call& call, const void* in, std::size_t in_parts, const void* out,
                         std::size_t out_parts, const ShareOf& share) {
  return add(call, [&] {
    require_device_memory(call, in, in_parts * call.bytes());
    require_device_memory(call, out, out_parts * call.bytes());
    std::vector<Share> shares;
    for (int r = 0; r < call.comm->core->size; ++r) shares.push_back(share(r));
    launch_of(call).operations.push_back(operation_of(call, shares));
  });
}

/// All parts are gathered, then summed in rank order. `scatter`: each rank sums its own part.
ncclResult_t reducing_call(const Call& call, const void* in, void* out, bool scatter) {
  return add(call, [&] {
    const Core& core = *call.comm->core;
    const auto size = static_cast<std::size_t>(core.size);
    const bool takes = call.root < 0 || call.root == core.rank;
    require_device_memory(call, in, call.bytes() * (scatter ? size : 1));
    require_device_memory(call, out, takes ? call.bytes() : 0);
    const auto room = std::make_shared<std::vector<std::byte>>(takes ? size * call.bytes() : 0);
    std::vector<Share> shares;
    for (std::size_t r = 0; r < size; ++r) {
      const bool goes = call.root < 0 || call.root == static_cast<int>(r);
      shares.push_back({static_cast<const std::byte*>(in) + (scatter ? r * call.bytes() : 0),
                        goes ? call.bytes() : 0, takes ? room->data() + r * call.bytes() : nullptr,
                        takes ? call.bytes() : 0});
    }
    Operation operation = operation_of(call, shares);
    operation.finish = [call, room, out, takes, size] {
      if (!takes) return;
      std::vector<const std::byte*> parts;
      for (std::size_t r = 0; r < size; ++r) parts.push_back(room->data() + r * call.bytes());
      reduce(call.type, static_cast<ncclRedOp_t>(call.op), parts, call.count,
             static_cast<std::byte*>(out));
    };
    launch_of(call).operations.push_back(std::move(operation));
  });
}

const std::byte* part(const void* base, int index, std::size_t bytes) {
  return static_cast<const std::byte*>(base) + static_cast<std::size_t>(index) * bytes;
}
std::byte* part(void* base, int index, std::size_t bytes) {
  return static_cast<std::byte*>(base) + static_cast<std::size_t>(index) * bytes;
}

}  // namespace
}  // namespace fake_nccl

using fake_nccl::Call;
using fake_nccl::part;
using fake_nccl::Share;

ncclResult_t ncclGroupStart() {
  ++fake_nccl::group.depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (fake_nccl::group.depth == 0) {
    return fake_nccl::report({ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart"});
  }
  if (fake_nccl::group.depth == 1) return fake_nccl::end_group();
  --fake_nccl::group.depth;
  return ncclSuccess;
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return fake_nccl::peer_call({"send", comm, stream, type, count, peer}, data, true);
}

ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return fake_nccl::peer_call({"receive", comm, stream, type, count, peer}, data, false);
}

ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return fake_nccl::reducing_call({"all-reduce", comm, stream, type, count, -1, op}, in, out,
                                  false);
}

ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return fake_nccl::reducing_call({"reduce", comm, stream, type, count, root, op}, in, out, false);
}

ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return fake_nccl::reducing_call({"reduce-scatter", comm, stream, type, count, -1, op}, in, out,
                                  true);
}

ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  const Call call{"broadcast", comm, stream, type, count, root};
  const bool gives = comm != nullptr && comm->core->rank == root;
  return fake_nccl::moving_call(call, in, gives ? 1 : 0, out, 1, [&](int r) {
    Share share;
    if (gives) share.send = static_cast<const std::byte*>(in), share.send_bytes = call.bytes();
    if (r == root) share.receive = static_cast<std::byte*>(out), share.receive_bytes = call.bytes();
    return share;
  });
}

ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  const Call call{"all-gather", comm, stream, type, count};
  const std::size_t ranks = comm != nullptr ? static_cast<std::size_t>(comm->core->size) : 0;
  return fake_nccl::moving_call(call, in, 1, out, ranks, [&](int r) {
    return Share{part(in, 0, 0), call.bytes(), part(out, r, call.bytes()), call.bytes()};
  });
}

ncclResult_t ncclAlltoAll(const void* in, void* out, size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream) {
  const Call call{"all-to-all", comm, stream, type, count};
  const std::size_t ranks = comm != nullptr ? static_cast<std::size_t>(comm->core->size) : 0;
  return fake_nccl::moving_call(call, in, ranks, out, ranks, [&](int r) {
    return Share{part(in, r, call.bytes()), call.bytes(), part(out, r, call.bytes()), call.bytes()};
  });
}
