#include "runtime/onednn_gemm.h"

#include <fmt/format.h>
#include <omp.h>

#include <dnnl.hpp>
#include <unordered_map>
#include <vector>

#include "runtime/error.h"
#include "runtime/versions.h"

namespace gatefold {
namespace {

using dnnl::matmul;
using dnnl::memory;

/// oneDNN reads OpenMP's thread count both when it creates and when it runs a primitive.
class ThreadCount {
 public:
  explicit ThreadCount(int threads) : before_(omp_get_max_threads()) {
    omp_set_num_threads(threads);
  }
  ~ThreadCount() { omp_set_num_threads(before_); }
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;

 private:
  int before_;
};

[[noreturn]] void fail(const dnnl::error& error, const char* what) {
  const bool memory = error.status == dnnl_out_of_memory;
  throw Error(memory ? ExitCode::kOutOfMemory : ExitCode::kBackend,
              fmt::format("oneDNN could not {} ({})", what, error.what()));
}

dnnl::engine cpu_engine() {
  try {
    return {dnnl::engine::kind::cpu, 0};
  } catch (const dnnl::error& error) {
    throw Error(ExitCode::kUnavailable, fmt::format("oneDNN has no CPU engine ({})", error.what()));
  }
}

}  // namespace

struct OnednnGemm::State {
  struct Context {
    dnnl::stream stream;
    memory a, w, c, scratch;
    std::unordered_map<int, memory> arguments;
  };
  matmul primitive;
  std::string implementation;
  int threads = 1;
  std::vector<Context> contexts;
};

OnednnGemm::OnednnGemm(std::unique_ptr<State> state) : state_(std::move(state)) {}
OnednnGemm::~OnednnGemm() = default;

std::unique_ptr<OnednnGemm> OnednnGemm::create(const Shape& shape, int contexts, int threads) {
  const ThreadCount guard(threads);
  const bool bf16 = shape.storage == DType::kBf16;
  const auto type = bf16 ? memory::data_type::bf16 : memory::data_type::f32;
  const auto packed = bf16 ? memory::format_tag::BA16a64b2a : memory::format_tag::BA16a64b;
  const memory::desc a({shape.rows, shape.inputs}, type, memory::format_tag::ab);
  const memory::desc w({shape.inputs, shape.columns}, type, packed);
  const memory::desc c({shape.rows, shape.columns}, memory::data_type::f32, memory::format_tag::ab);
  try {
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    attributes.set_fpmath_mode(dnnl::fpmath_mode::strict);
    const dnnl::engine engine = cpu_engine();
    const matmul::primitive_desc descriptor(matmul::desc(a, w, c), attributes, engine);
    auto state = std::make_unique<State>();
    state->implementation = descriptor.impl_info_str();
    // Others ("gemm:jit", "ref") accept the packing too, but slowly or with other bits per row.
    if (!state->implementation.starts_with("brg:")) return nullptr;
    state->primitive = matmul(descriptor);
    state->threads = threads;
    for (int i = 0; i < contexts; ++i) {
      State::Context context{dnnl::stream(engine),
                             memory(a, engine, DNNL_MEMORY_NONE),
                             memory(w, engine, DNNL_MEMORY_NONE),
                             memory(c, engine, DNNL_MEMORY_NONE),
                             memory(descriptor.scratchpad_desc(), engine),
                             {}};
      context.arguments = {{DNNL_ARG_SRC, context.a},
                           {DNNL_ARG_WEIGHTS, context.w},
                           {DNNL_ARG_DST, context.c},
                           {DNNL_ARG_SCRATCHPAD, context.scratch}};
      state->contexts.push_back(std::move(context));
    }
    return std::unique_ptr<OnednnGemm>(new OnednnGemm(std::move(state)));
  } catch (const dnnl::error& error) {
    if (error.status == dnnl_unimplemented) return nullptr;
    fail(error, "create a matmul");
  }
}

void OnednnGemm::run(int context, const std::byte* a, const std::byte* w, float* c) {
  const ThreadCount guard(state_->threads);
  State::Context& own = state_->contexts[static_cast<std::size_t>(context)];
  try {
    own.a.set_data_handle(const_cast<std::byte*>(a));
    own.w.set_data_handle(const_cast<std::byte*>(w));
    own.c.set_data_handle(c);
    state_->primitive.execute(own.stream, own.arguments);
    own.stream.wait();
  } catch (const dnnl::error& error) {
    fail(error, "run a matmul");
  }
}

std::string OnednnGemm::implementation() const { return state_->implementation; }

namespace {

const char* isa_name() {
  switch (dnnl::get_effective_cpu_isa()) {
    case dnnl::cpu_isa::sse41: return "SSE4.1";
    case dnnl::cpu_isa::avx: return "AVX";
    case dnnl::cpu_isa::avx2: return "AVX2";
    case dnnl::cpu_isa::avx2_vnni: return "AVX2 VNNI";
    case dnnl::cpu_isa::avx512_core: return "AVX-512";
    case dnnl::cpu_isa::avx512_core_vnni: return "AVX-512 VNNI";
    case dnnl::cpu_isa::avx512_core_bf16: return "AVX-512 BF16";
    case dnnl::cpu_isa::avx512_core_amx: return "AMX";
    default: return "another ISA";
  }
}

}  // namespace

bool OnednnGemm::multiplies_bf16() {
  return multiplies_by_amx() || dnnl::get_effective_cpu_isa() == dnnl::cpu_isa::avx512_core_bf16;
}

bool OnednnGemm::multiplies_by_amx() {
  return dnnl::get_effective_cpu_isa() == dnnl::cpu_isa::avx512_core_amx;
}

std::string onednn_version() {
  const dnnl_version_t* version = dnnl_version();
  return fmt::format("{}.{}.{} ({})", version->major, version->minor, version->patch, isa_name());
}

}  // namespace gatefold
