// A layer in a program that has a stream and a NCCL communicator of its own already.
#include <gmock/gmock.h>
#include <mpi.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "layers/mlp.h"
#include "parallel/mpi_interop.h"
#include "parallel/nccl_interop.h"
#include "runtime/cuda_interop.h"
#include "tests/fake_gpu/nccl/nccl_testing.h"
#include "tests/layers/memory_source.h"

namespace gatefold {
namespace {

using fake_nccl_testing::OnDevice;

constexpr std::int64_t kHidden = 64;
constexpr std::int64_t kTokens = 70;

class CallersGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fake_nccl_testing::take_gpu(world_->rank(), world_->size());
    stream_ = std::make_unique<fake_nccl_testing::Stream>();
    ncclUniqueId id{};
    if (world_->rank() == 0) ncclGetUniqueId(&id);
    world_->broadcast(reinterpret_cast<std::byte*>(&id), sizeof(id), 0);
    fake_nccl_testing::start(&comm_, world_->size(), id, world_->rank(), 0);
    ASSERT_EQ(fake_nccl_testing::settle(comm_), ncclSuccess);
  }
  void TearDown() override { ncclCommAbort(comm_); }

  /// y as work on the stream between the caller's own copies: nothing here waits for the layer.
  std::vector<float> forward(Device& device, Communicator& tp) {
    const testing::MemoryFfn ffn({kHidden, 96, true, true});
    MlpOptions options;
    options.linear.dtype = DType::kF32;
    Mlp mlp(ffn.spec, ffn.source, {&device, &tp}, options);
    mlp.reserve({kTokens, kTokens});
    std::vector<float> host = testing::noise(kTokens * kHidden, 7, 1.0F);
    const std::size_t bytes = host.size() * sizeof(float);
    const OnDevice<float> x(std::vector<float>(host.size()));
    const OnDevice<float> y(std::vector<float>(host.size()));
    EXPECT_EQ(cudaMemcpyAsync(x.data(), host.data(), bytes, cudaMemcpyHostToDevice, *stream_),
              cudaSuccess);
    mlp.forward(reinterpret_cast<std::byte*>(x.data()), {kTokens, kTokens},
                reinterpret_cast<std::byte*>(y.data()));
    EXPECT_EQ(cudaMemcpyAsync(host.data(), y.data(), bytes, cudaMemcpyDeviceToHost, *stream_),
              cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(*stream_), cudaSuccess);
    return host;
  }

  std::unique_ptr<Communicator> world_ = make_mpi_communicator(MPI_COMM_WORLD);
  std::unique_ptr<fake_nccl_testing::Stream> stream_;
  ncclComm_t comm_ = nullptr;
};

TEST_F(CallersGpuTest, ALayerIsWorkOnTheirStreamWithTheBitsOfOneRank) {
  const auto device = make_cuda_device_on(*stream_);
  const auto tp = use_nccl_communicator(comm_, *world_, *stream_);
  const auto self = make_self_communicator();
  const std::vector<float> alone = forward(*device, *self);
  EXPECT_EQ(forward(*device, *tp), alone);
  EXPECT_GT(*std::max_element(alone.begin(), alone.end()), 0.01F);
}

}  // namespace
}  // namespace gatefold
