#include "parallel/staged_communicator.h"

#include <numeric>
#include <utility>
#include <vector>

#include "runtime/error.h"

namespace gatefold {
namespace {

constexpr std::int64_t kFloatBytes = size_of(DType::kF32);

class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(Communicator& inner, Device& device)
      : Communicator(inner.rank(), inner.size(), &inner.progress()),
        inner_(inner),
        device_(device) {}
  StagedCommunicator(std::unique_ptr<Communicator> part, Device& device)
      : StagedCommunicator(*part, device) {
    part_ = std::move(part);
  }
  /// The stage is in use until the device is done; what fails here has failed elsewhere too.
  ~StagedCommunicator() override {
    try {
      device_.synchronize();
    } catch (const Error&) {
    }
  }
  StagedCommunicator(const StagedCommunicator&) = delete;
  StagedCommunicator& operator=(const StagedCommunicator&) = delete;

  std::string description() const override {
    return inner_.description() + ", through host memory";
  }
  Communicator& host() override { return inner_.host(); }

  void exchange(std::span<const Transfer> sends, std::span<const Transfer> receives) override {
    copy_own_pieces(rank(), sends, receives,
                    [this](std::byte* out, const std::byte* in, std::int64_t bytes) {
                      device_.copy_rows(out, bytes, in, bytes, 1, bytes);
                    });
    stage(sends, receives);
    for (std::size_t i = 0; i < staged_sends_.size(); ++i) {
      device_.start_download(staged_sends_[i].data, device_sends_[i].data, device_sends_[i].bytes);
    }
    device_.synchronize();
    inner_.exchange(staged_sends_, staged_receives_);
    for (std::size_t i = 0; i < staged_receives_.size(); ++i) {
      device_.start_upload(device_receives_[i].data, staged_receives_[i].data,
                           device_receives_[i].bytes);
    }
  }

  void all_gather_v(std::byte* all, std::span<const std::int64_t> parts) override {
    if (size() == 1) return;
    std::int64_t bytes = 0;
    for (const std::int64_t part : parts) bytes += part;
    std::byte* staged = grow(bytes);
    std::int64_t offset = 0;
    const auto each_part = [&](const auto& use) {
      offset = 0;
      for (int r = 0; r < size(); ++r) {
        const std::int64_t part = parts[static_cast<std::size_t>(r)];
        if (part > 0) use(r == rank(), part);
        offset += part;
      }
    };
    each_part([&](bool own, std::int64_t part) {
      if (own) device_.start_download(staged + offset, all + offset, part);
    });
    device_.synchronize();
    inner_.all_gather_v(staged, parts);
    each_part([&](bool own, std::int64_t part) {
      if (!own) device_.start_upload(all + offset, staged + offset, part);
    });
  }

  void broadcast(std::byte* data, std::int64_t bytes, int root) override {
    if (size() == 1) return;
    std::byte* staged = grow(bytes);
    if (rank() == root) device_.start_download(staged, data, bytes);
    device_.synchronize();
    inner_.broadcast(staged, bytes, root);
    if (rank() != root) device_.start_upload(data, staged, bytes);
  }

  void barrier() override {
    device_.synchronize();
    inner_.barrier();
  }
  void wait() override { device_.synchronize(); }

  void all_reduce(float* data, std::int64_t count) override {
    if (size() == 1) return;
    const std::int64_t bytes = count * kFloatBytes;
    std::byte* staged = grow(bytes);
    device_.start_download(staged, reinterpret_cast<std::byte*>(data), bytes);
    device_.synchronize();
    inner_.all_reduce(reinterpret_cast<float*>(staged), count);
    device_.start_upload(reinterpret_cast<std::byte*>(data), staged, bytes);
  }

  void reduce_scatter_v(float* data, std::span<const std::int64_t> counts) override {
    if (size() == 1) return;
    const std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
    const std::int64_t own = before_own(counts);
    auto* staged = reinterpret_cast<float*>(grow(total * kFloatBytes));
    device_.start_download(reinterpret_cast<std::byte*>(staged), reinterpret_cast<std::byte*>(data),
                           total * kFloatBytes);
    device_.synchronize();
    inner_.reduce_scatter_v(staged, counts);
    device_.start_upload(reinterpret_cast<std::byte*>(data + own),
                         reinterpret_cast<std::byte*>(staged + own),
                         counts[static_cast<std::size_t>(rank())] * kFloatBytes);
  }

  void reserve(std::int64_t bytes) override {
    if (size() > 1) grow(bytes);
  }

  std::unique_ptr<Communicator> split(int color) override {
    return std::make_unique<StagedCommunicator>(inner_.split(color), device_);
  }

 private:
  /// Pinned memory; what was in it is lost.
  std::byte* grow(std::int64_t bytes) {
    if (stage_.bytes() < bytes) {
      device_.synchronize();
      stage_ = device_.allocate_host(bytes);
    }
    return stage_.data();
  }

  /// The pieces for and from peers, in device memory and where they are staged.
  void stage(std::span<const Transfer> sends, std::span<const Transfer> receives) {
    device_sends_.clear();
    device_receives_.clear();
    staged_sends_.clear();
    staged_receives_.clear();
    std::int64_t bytes = 0;
    const auto list = [&](std::span<const Transfer> from, std::vector<Transfer>& to) {
      for (const Transfer& piece : from) {
        if (piece.peer == rank() || piece.bytes == 0) continue;
        to.push_back(piece);
        bytes += piece.bytes;
      }
    };
    list(sends, device_sends_);
    list(receives, device_receives_);
    std::byte* next = grow(bytes);
    const auto place = [&](const std::vector<Transfer>& from, std::vector<Transfer>& to) {
      for (const Transfer& piece : from) {
        to.push_back({piece.peer, next, piece.bytes});
        next += piece.bytes;
      }
    };
    place(device_sends_, staged_sends_);
    place(device_receives_, staged_receives_);
  }

  std::unique_ptr<Communicator> part_;  // owned where this is a split's
  Communicator& inner_;
  Device& device_;
  Buffer stage_;
  // Kept, so that steady calls allocate nothing.
  std::vector<Transfer> device_sends_;
  std::vector<Transfer> device_receives_;
  std::vector<Transfer> staged_sends_;
  std::vector<Transfer> staged_receives_;
};

}  // namespace

std::unique_ptr<Communicator> make_staged_communicator(Communicator& inner, Device& device) {
  return std::make_unique<StagedCommunicator>(inner, device);
}

}  // namespace gatefold
