// The named ranges of a layer's phases, as a profiler gets them: this program is one, by NVTX's
// weak symbol.
#include <gmock/gmock.h>
#include <mpi.h>

#include <cstdint>

// The header's weak symbol, which is defined here instead.
#define NVTX_STATIC_INJECTION_IMPL
extern "C" {
extern int (*InitializeInjectionNvtx2_fnptr)(const void* (*get_table)(std::uint32_t));
}
#include <nvtx3/nvToolsExt.h>

#include <string>
#include <vector>

#include "layers/mlp.h"
#include "memory_source.h"
#include "parallel/mpi_interop.h"
#include "parallel/staged_communicator.h"
#include "runtime/phases.h"

namespace {

std::string domains;   // that were created
std::string recorded;  // "name(" where a range begins, ")" where it ends

nvtxDomainHandle_t create_domain(const char* name) {
  domains += name;
  return reinterpret_cast<nvtxDomainHandle_t>(&domains);
}
int push_range(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* range) {
  if (domain != reinterpret_cast<nvtxDomainHandle_t>(&domains)) recorded += "foreign ";
  recorded += std::string(range->message.ascii) + "(";
  return 0;
}
int pop_range(nvtxDomainHandle_t) {
  recorded += ")";
  return 0;
}

int attach(NvtxGetExportTableFunc_t get_table) {
  const auto* callbacks =
      static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks == nullptr ||
      callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0) {
    return 0;
  }
  const auto hook = [&](NvtxCallbackIdCore2 id, auto function) {
    *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
  };
  hook(NVTX_CBID_CORE2_DomainCreateA, create_domain);
  hook(NVTX_CBID_CORE2_DomainRangePushEx, push_range);
  hook(NVTX_CBID_CORE2_DomainRangePop, pop_range);
  return 1;
}

}  // namespace

NvtxInitializeInjectionNvtxFunc_t InitializeInjectionNvtx2_fnptr = attach;

namespace gatefold {
namespace {

constexpr std::int64_t kHidden = 128;
constexpr std::int64_t kRows = 200;  // roots of more bytes than are added in one shot

/// What the profiler sees of one step of a layer of two blocks.
std::string ranges_of_a_step(Reduce reduce) {
  const auto device = make_cuda_device(0);
  const auto world = make_mpi_communicator(MPI_COMM_WORLD);
  const auto tp = make_staged_communicator(*world, *device);
  const testing::MemoryFfn ffn({kHidden, 128});
  MlpOptions options;
  options.linear.dtype = DType::kF32;
  options.linear.blocks = 2;
  options.linear.reduce = reduce;
  Mlp mlp(ffn.spec, ffn.source, {device.get(), tp.get()}, options);
  mlp.reserve({kRows, kRows});
  const std::int64_t bytes = kRows * kHidden * size_of(DType::kF32);
  const Buffer x = device->allocate(bytes);
  const Buffer y = device->allocate(bytes);
  const std::vector<std::byte> ones(static_cast<std::size_t>(bytes), std::byte{1});
  device->upload(x.data(), ones.data(), bytes);
  recorded.clear();
  mlp.forward(x.data(), {kRows, kRows}, y.data());
  return recorded;
}

TEST(CudaRanges, NameThePhasesOfAStepInTheirOrder) {
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  EXPECT_EQ(ranges_of_a_step(Reduce::kExact),
            ranks == 1 ? "tile()gate_up()down()gate_up()down()sum()"
                       : "tile()gate_up()down()sum(exchange()add()gather())");
  EXPECT_EQ(ranges_of_a_step(Reduce::kFast), "tile()gate_up()down()sum(all-reduce()add())");
  EXPECT_THAT(domains, ::testing::HasSubstr("Gatefold"));
}

TEST(CudaRanges, EndWhereAnErrorLeavesThem) {
  const auto device = make_cuda_device(0);
  recorded.clear();
  try {
    Phases outer(*device);
    outer.enter("outer");
    Phases inner(*device);
    inner.enter("first");
    inner.enter("second");
    throw 1;
  } catch (int) {
    EXPECT_EQ(recorded, "outer(first()second())");
  }
}

}  // namespace
}  // namespace gatefold
