// MPI as what carries a group's messages, and what only MPI's communicator does.
#include <gmock/gmock.h>
#include <mpi.h>

#include <chrono>
#include <thread>
#include <vector>

#include "parallel/mpi_interop.h"
#include "parallel/staged_communicator.h"
#include "runtime/error.h"
#include "tests/parallel/backends.h"
#include "tests/parallel/carried_communicator.h"
#include "tests/runtime/counting_device.h"
#include "tests/testing_device.h"

namespace gatefold {

namespace {

/// Its memory can't be taken for the host's: copies between the two change the sign of every float,
/// and so every fourth byte.
class SignedMemory final : public testing::CountingDevice {
 public:
  SignedMemory() : CountingDevice(make_cpu_device(1)) {}
  bool in_host_memory() const override { return false; }
  void start_download(std::byte* host, const std::byte* in, std::int64_t bytes) override {
    for (std::int64_t i = 0; i < bytes; ++i) host[i] = in[i] ^ std::byte(i % 4 == 3 ? 0x80 : 0);
  }
  void start_upload(std::byte* out, const std::byte* host, std::int64_t bytes) override {
    start_download(out, host, bytes);
  }
};

Backend staged_on_a_gpu() {
  return {"staged_on_a_gpu", [] { return make_mpi_communicator(MPI_COMM_WORLD); }, false,
          [](Communicator& inner) -> std::unique_ptr<Communicator> {
            const std::shared_ptr<Device> device = testing::testing_device();
            auto staged = make_staged_communicator(inner, *device);
            return std::make_unique<CarriedCommunicator>(device, std::move(staged));
          }};
}

}  // namespace

std::vector<Backend> backends() {
  if (testing::on_cuda()) return {staged_on_a_gpu()};
  const auto whole = [] { return make_mpi_communicator(MPI_COMM_WORLD); };
  const auto in_small_pieces = [] {
    MpiOptions options;
    options.max_message_bytes = 100;
    return make_mpi_communicator(MPI_COMM_WORLD, options);
  };
  const auto staged = [](Communicator& inner) {
    static SignedMemory device;
    return make_staged_communicator(inner, device);
  };
  return {{"mpi", whole},
          {"mpi_in_small_pieces", in_small_pieces},
          {"half_of_mpi", whole, true},
          {"staged", whole, false, staged},
          {"self", [] { return make_self_communicator(); }}};
}

namespace {

constexpr std::byte kPoison{0xa5};

TEST(MpiCommunicator, RefusesAPieceSizeThatMpiCannotCount) {
  for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{3}, std::int64_t{1} << 31}) {
    MpiOptions options;
    options.max_message_bytes = bytes;
    EXPECT_THROW(make_mpi_communicator(MPI_COMM_WORLD, options), Error) << bytes;
  }
}

TEST(MpiCommunicator, LeavesTheCallersOwnCommunicatorAlone) {
  MPI_Errhandler before;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &before);
  make_mpi_communicator(MPI_COMM_WORLD)->barrier();
  MPI_Errhandler after;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &after);
  EXPECT_EQ(before, after);
  EXPECT_EQ(before, MPI_ERRORS_ARE_FATAL);
}

// From here on communicators are broken on purpose; each test has one of its own.

TEST(MpiCommunicator, ALongerMessageThanExpectedIsError70WithTheCallNamed) {
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  const auto part = world->split(0);
  if (world->size() < 2) return;
  for (Communicator* comm : {world.get(), part.get()}) {
    std::vector<std::byte> memory(16, kPoison);
    const Transfer sends{1, memory.data(), 16};
    const Transfer receives{0, memory.data(), 8};
    if (comm->rank() == 0) comm->exchange({&sends, 1}, {});
    if (comm->rank() == 1) {
      try {
        comm->exchange({}, {&receives, 1});
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::kBackend);
        EXPECT_THAT(error.what(), ::testing::HasSubstr("exchange"));
        EXPECT_THAT(error.what(), ::testing::HasSubstr("MPI_ERR_TRUNCATE"));
      }
    }
  }
}

TEST(MpiCommunicator, APeerThatDoesntAnswerIsError75AndItsLateMessageLandsNowhere) {
  Progress progress;
  MpiOptions options;
  options.timeout_seconds = 1;
  options.progress = &progress;
  const auto comm = make_mpi_communicator(MPI_COMM_WORLD, options);
  if (comm->size() < 2) return;
  progress.enter("the test's own phase");
  std::vector<std::byte> memory(1000, kPoison);
  comm->barrier();
  if (comm->rank() == 0) {
    const auto start = std::chrono::steady_clock::now();
    const Transfer receive{1, memory.data(), 1000};
    try {
      comm->exchange({}, {&receive, 1});
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kTimeout);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("exchange"));
      EXPECT_THAT(error.what(), ::testing::HasSubstr("the test's own phase"));
      EXPECT_THAT(error.what(), ::testing::HasSubstr("1 s"));
      EXPECT_THAT(error.what(), ::testing::HasSubstr("--timeout"));
    }
    const auto waited = std::chrono::steady_clock::now() - start;
    EXPECT_GE(waited, std::chrono::milliseconds(1000));
    EXPECT_LT(waited, std::chrono::milliseconds(2400));  // before the message comes
  }
  if (comm->rank() == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    const std::vector<std::byte> late(1000, std::byte{1});
    const Transfer send{0, const_cast<std::byte*>(late.data()), 1000};
    comm->exchange({&send, 1}, {});  // small enough to leave without being received
  }
  // The late message is on its way by now; whatever MPI does with it, it does here.
  for (int i = 0; i < 3; ++i) MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_EQ(memory, std::vector<std::byte>(1000, kPoison));
}

}  // namespace
}  // namespace gatefold
