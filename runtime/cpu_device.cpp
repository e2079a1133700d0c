#include <fmt/format.h>
#include <immintrin.h>
#include <omp.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/expert_kernels.h"
#include "runtime/gemm_check.h"
#include "runtime/hash.h"
#include "runtime/onednn_gemm.h"
#include "runtime/router_kernels.h"
#include "runtime/row_kernel.h"
#include "runtime/sum_kernel.h"
#include "runtime/tensor_source.h"
#include "runtime/versions.h"

namespace gatefold {
namespace {

constexpr std::int64_t kAlignment = 256;
/// libgomp keeps a record per thread on the stack when it starts them: 96 bytes, and some more.
constexpr rlim_t kRecordBytes = 128;
constexpr rlim_t kOtherStackBytes = 64 << 10;
constexpr rlim_t kMaxThreads = 4096;
constexpr std::int64_t kHugePage = 2 << 20;
/// A panel of columns that stays in a core's L2 while all tiles pass over it.
constexpr std::int64_t kPanelBytes = 1 << 20;
/// A batch of one tile reads each panel once; wide ones are then faster. oneDNN 2.6 cuts the inner
/// dimension, and so changes bits, somewhere between 4 and 5.5 MB of weights.
constexpr std::int64_t kAlonePanelBytes = 4 << 20;

std::int64_t groups_in(std::int64_t bytes, const WeightShape& shape, DType storage) {
  const std::int64_t group_bytes = shape.padded_inputs() * kGroup * size_of(storage);
  const std::int64_t fitting = std::clamp<std::int64_t>(bytes / group_bytes, 1, shape.groups());
  // Panels of one size, as far as they go.
  return ceil_div(shape.groups(), ceil_div(shape.groups(), fitting));
}

/// How many groups of columns one tile GEMM takes. No bit depends on it where the self-check has
/// found all the widths that can occur to agree; else (kLibraryPanels) there is just one width.
std::int64_t panel_groups(const WeightShape& shape, DType storage, bool alone, int threads) {
  if (!alone) return groups_in(kPanelBytes, shape, storage);
  return std::min(groups_in(kAlonePanelBytes, shape, storage), ceil_div(shape.groups(), threads));
}

/// The widths in columns that tile GEMMs on this weight may have.
std::set<std::int64_t> tile_columns(const WeightShape& shape, DType storage, int threads) {
  std::set<std::int64_t> columns;
  for (const bool alone : {false, true}) {
    const std::int64_t panel = panel_groups(shape, storage, alone, threads);
    columns.insert(panel * kGroup);
    if (shape.groups() % panel != 0) columns.insert(shape.groups() % panel * kGroup);
  }
  return columns;
}

/// Denormals count in every compute thread, whatever the caller's MXCSR says.
class DenormalsOn {
 public:
  DenormalsOn() : before_(_mm_getcsr()) { _mm_setcsr(before_ & ~kFlushBits); }
  ~DenormalsOn() { _mm_setcsr(before_); }
  DenormalsOn(const DenormalsOn&) = delete;
  DenormalsOn& operator=(const DenormalsOn&) = delete;

 private:
  static constexpr unsigned kFlushBits = 0x8040;  // FTZ, DAZ
  unsigned before_;
};

void release(std::byte* data, std::int64_t) { std::free(data); }

/// What can be had without swapping, all processes of this machine considered; the largest number
/// where Linux doesn't say.
std::int64_t available_memory() {
  std::ifstream meminfo("/proc/meminfo");
  std::string name;
  for (std::int64_t kib = 0; meminfo >> name >> kib; meminfo.ignore(80, '\n')) {
    if (name == "MemAvailable:") return kib << 10;
  }
  return std::numeric_limits<std::int64_t>::max();
}

Buffer allocate_bytes(std::int64_t bytes) {
  // Linux promises more memory than there is, and kills who then uses it.
  const std::int64_t left =
      bytes < kHugePage ? std::numeric_limits<std::int64_t>::max() : available_memory();
  if (bytes > left) {
    throw Error(ExitCode::kOutOfMemory,
                fmt::format("{} bytes of memory could not be had (this machine has {} left); use "
                            "more ranks on more machines, or fewer tokens",
                            bytes, left));
  }
  // Whole huge pages, the last one too: a block's weight is only a few of them long.
  const std::int64_t alignment = bytes >= kHugePage ? kHugePage : kAlignment;
  const auto padded =
      static_cast<std::size_t>(round_up(std::max<std::int64_t>(bytes, 1), alignment));
  void* data = nullptr;
  if (posix_memalign(&data, static_cast<std::size_t>(alignment), padded) != 0) {
    throw Error(
        ExitCode::kOutOfMemory,
        fmt::format("{} bytes of memory could not be had; use more ranks or fewer tokens", padded));
  }
  // Fewer TLB misses when weights stream through; a refusal costs only speed.
  if (alignment == kHugePage) madvise(data, padded, MADV_HUGEPAGE);
  return {static_cast<std::byte*>(data), {release, bytes}};
}

/// The unit of work: some groups of columns for some rows, as a rule one tile.
struct Unit {
  std::int64_t first_group;
  std::int64_t groups;
  std::int64_t first_row;
  std::int64_t rows;
};

/// Rows that are activated together after a whole GEMM, and rows of a group that are summed
/// together.
constexpr std::int64_t kWholeStep = 16;
constexpr std::int64_t kSumRows = 64;

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(int threads) : threads_(threads) {
    scratch_.resize(static_cast<std::size_t>(threads_));
  }

  std::string description() const override {
    return fmt::format("cpu, {} thread{}", threads_, threads_ == 1 ? "" : "s");
  }
  std::string library() const override {
    const std::string version = onednn_version();
    return version.empty() ? "plain kernels (this build has no oneDNN)" : "oneDNN " + version;
  }
  DType storage(DType model) const override {
    return model == DType::kBf16 && OnednnGemm::multiplies_bf16() ? DType::kBf16 : DType::kF32;
  }

  std::int64_t last_level_cache() const override {
    const long bytes = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
    return bytes > 0 ? bytes : std::int64_t{32} << 20;
  }
  std::span<const std::int64_t> tile_heights() const override {
    if (OnednnGemm::multiplies_by_amx()) return kAmxTileHeights;
    return kCpuTileHeights;
  }

  Buffer allocate(std::int64_t bytes) override { return allocate_bytes(bytes); }
  void upload(std::byte* out, const std::byte* host, std::int64_t bytes) override {
    if (bytes > 0) std::memcpy(out, host, static_cast<std::size_t>(bytes));
  }
  void download(std::byte* host, const std::byte* in, std::int64_t bytes) override {
    if (bytes > 0) std::memcpy(host, in, static_cast<std::size_t>(bytes));
  }
  bool in_host_memory() const override { return true; }
  Buffer allocate_host(std::int64_t bytes) override { return allocate_bytes(bytes); }
  void start_upload(std::byte* out, const std::byte* host, std::int64_t bytes) override {
    upload(out, host, bytes);
  }
  void start_download(std::byte* host, const std::byte* in, std::int64_t bytes) override {
    download(host, in, bytes);
  }
  void copy_rows(std::byte* out, std::int64_t out_stride, const std::byte* in,
                 std::int64_t in_stride, std::int64_t rows, std::int64_t bytes) override {
    if (bytes == 0) return;  // there may be nothing to point at
    parallel(rows, [&](std::int64_t row, int) {
      std::memcpy(out + row * out_stride, in + row * in_stride, static_cast<std::size_t>(bytes));
    });
  }
  void fill(std::byte* out, std::byte value, std::int64_t bytes) override {
    std::memset(out, std::to_integer<int>(value), static_cast<std::size_t>(bytes));
  }
  void synchronize() override {}

  Weight allocate_weight(const WeightShape& shape, DType model, GemmKernel kernel) override;
  void store_rows(Weight& weight, std::int64_t first_row, std::int64_t rows,
                  const std::byte* host) override;
  // oneDNN chooses by the shape and the instruction set, which its name tells.
  std::vector<std::byte> choose_gemms(std::span<const WeightShape>, DType) override { return {}; }
  void pin_gemms(std::span<const WeightShape>, DType, std::span<const std::byte>) override {}
  void prepare(const WeightShape& shape, DType storage, GemmKernel kernel,
               std::int64_t tile_rows) override;
  SelfCheck self_check(const WeightShape& shape, DType storage) override;

  void tile_rows(const InputRows& x, DType model, std::int64_t columns, const Tiles& out) override;
  void untile_rows(const Tiles& in, DType model, std::int64_t columns, std::byte* out,
                   std::int64_t out_stride) override;
  void gemm_activation(const Weight& weight, const float* bias, const Activation& activation,
                       DType model, const Tiles& x, const Tiles& h) override;
  void gemm_merge(const Weight& weight, const Tiles& h, const Partials& stack, int height,
                  int merges) override;
  void sum_roots(const RootSum& sum) override;
  void ungroup(const std::byte* in, DType dtype, std::int64_t rows, std::int64_t columns,
               std::byte* out) override;
  void gather_rows(std::byte* out, const std::byte* in, const std::int32_t* index,
                   std::int64_t rows, std::int64_t bytes) override;
  void router_logits(const LogitRows& io) override;
  void choose_experts(const RouteRule& rule, const float* logits, const float* correction,
                      std::int64_t rows, std::int32_t* ids, float* weights) override;
  void score_logits(const ScoredLogits& io) override;
  void weigh_rows(const WeighedRows& io) override;
  void combine_rows(const CombinedRows& io) override;

 private:
  /// Calls body(i, thread) for i in [0, n), each thread a contiguous part. Throws what the first
  /// failing call threw: an exception must not leave an OpenMP region by itself.
  template <typename Body>
  void parallel(std::int64_t n, const Body& body) {
    std::exception_ptr failure;
#pragma omp parallel num_threads(threads_)
    {
      const DenormalsOn guard;
      const int thread = omp_get_thread_num();
#pragma omp for schedule(static)
      for (std::int64_t i = 0; i < n; ++i) {
        try {
          body(i, thread);
        } catch (...) {
#pragma omp critical(gatefold_failure)
          if (!failure) failure = std::current_exception();
        }
      }
    }
    if (failure) std::rethrow_exception(failure);
  }

  OnednnGemm* gemm(const OnednnGemm::Shape& shape, bool whole);
  float* scratch(int thread, std::int64_t floats);
  template <typename Use>
  void gemm_units(const Weight& weight, const Tiles& in, const Use& use);
  void multiply(const Weight& weight, const Tiles& in, const Unit& unit, int thread, float* c);

  int threads_;
  std::vector<Buffer> scratch_;
  /// Keyed by shape and whether it uses all threads.
  std::map<std::pair<OnednnGemm::Shape, bool>, std::unique_ptr<OnednnGemm>> gemms_;
};

Weight CpuDevice::allocate_weight(const WeightShape& shape, DType model, GemmKernel kernel) {
  Weight weight{shape, storage(model), kernel, {}};
  const std::int64_t bytes =
      shape.groups() * kGroup * shape.padded_inputs() * size_of(weight.storage);
  weight.data = allocate(bytes);
  std::memset(weight.data.data(), 0, static_cast<std::size_t>(bytes));
  return weight;
}

/// Writes one row's elements to column `column` of a packed group.
template <typename Element, std::int64_t kPair>
void pack_row(const Element* row, std::int64_t inputs, Element* group, std::int64_t column) {
  const std::int64_t whole = inputs / kPair * kPair;
  for (std::int64_t k = 0; k < whole; k += kPair) {
    std::memcpy(group + k * kGroup + column * kPair, row + k, sizeof(Element) * kPair);
  }
  for (std::int64_t k = whole; k < inputs; ++k) {
    group[whole * kGroup + column * kPair + (k - whole)] = row[k];
  }
}

void CpuDevice::store_rows(Weight& weight, std::int64_t first_row, std::int64_t rows,
                           const std::byte* host) {
  const WeightShape& shape = weight.shape;
  const std::int64_t group_elements = shape.padded_inputs() * kGroup;
  // Threads take whole groups' worth of rows, so that two never write the same cache line.
  const std::int64_t run = shape.group_outputs();
  const std::int64_t first_run = first_row / run;
  const std::int64_t runs = ceil_div(first_row + rows, run) - first_run;
  parallel(runs, [&](std::int64_t i, int) {
    const std::int64_t begin = std::max(first_row, (first_run + i) * run);
    const std::int64_t end = std::min(first_row + rows, (first_run + i + 1) * run);
    for (std::int64_t row = begin; row < end; ++row) {
      const bool up = shape.gated && row >= shape.outputs;
      const std::int64_t output = up ? row - shape.outputs : row;
      const std::int64_t group = output / shape.group_outputs();
      const std::int64_t column = output % shape.group_outputs() + (up ? kGatedGroup : 0);
      const std::int64_t source = (row - first_row) * shape.inputs;
      if (weight.storage == DType::kBf16) {
        pack_row<std::uint16_t, 2>(
            reinterpret_cast<const std::uint16_t*>(host) + source, shape.inputs,
            weight.data.as<std::uint16_t>() + group * group_elements, column);
      } else {
        pack_row<float, 1>(reinterpret_cast<const float*>(host) + source, shape.inputs,
                           weight.data.as<float>() + group * group_elements, column);
      }
    }
  });
}

/// Null where oneDNN has no kernel for packed weights on this CPU.
OnednnGemm* CpuDevice::gemm(const OnednnGemm::Shape& shape, bool whole) {
  const auto found = gemms_.find({shape, whole});
  if (found != gemms_.end()) return found->second.get();
  auto made = OnednnGemm::create(shape, whole ? 1 : threads_, whole ? threads_ : 1);
  return gemms_.emplace(std::pair(shape, whole), std::move(made)).first->second.get();
}

void CpuDevice::prepare(const WeightShape& shape, DType storage, GemmKernel kernel,
                        std::int64_t tile_rows) {
  const std::int64_t inputs = shape.padded_inputs();
  const std::int64_t all_columns = shape.groups() * kGroup;
  const bool whole = kernel == GemmKernel::kLibraryWhole;
  if (whole) gemm({tile_rows, inputs, all_columns, storage}, true);
  std::int64_t widest = whole ? all_columns : 0;
  if (!whole) {
    for (const std::int64_t columns : tile_columns(shape, storage, threads_)) {
      widest = std::max(widest, columns);
      if (kernel == GemmKernel::kPlain || tile_rows == 1) continue;
      gemm({tile_rows, inputs, columns, storage}, false);
    }
  }
  for (int thread = 0; thread < (whole ? 1 : threads_); ++thread) {
    scratch(thread, tile_rows * widest);
  }
}

SelfCheck CpuDevice::self_check(const WeightShape& shape, DType storage) {
  const DenormalsOn guard;
  const std::int64_t inputs = shape.padded_inputs();
  // The same on every rank, whatever its thread count: where the fingerprint comes from.
  const std::int64_t base = groups_in(kPanelBytes, shape, storage) * kGroup;
  const std::int64_t rest = shape.groups() * kGroup % base;  // the last panel's width, if another
  SelfCheck result{true, true, "", 0};
  Fnv1a fingerprint;
  for (const std::int64_t rows : tile_heights()) {
    if (rows == 1) continue;  // never the library's
    std::map<std::int64_t, TileGemm> gemms;
    for (const std::int64_t columns : tile_columns(shape, storage, threads_)) {
      const std::shared_ptr<OnednnGemm> gemm =
          OnednnGemm::create({rows, inputs, columns, storage}, 1, 1);
      if (gemm == nullptr) return {false, false, "", 0};
      if (columns == base) result.kernel = gemm->implementation();
      gemms[columns] = [gemm](const std::byte* a, const std::byte* w, float* c) {
        gemm->run(0, a, w, c);
      };
    }
    const WidthsCheck check = check_widths(rows, inputs, storage, base, rest, gemms);
    result.rows = result.rows && check.rows;
    result.columns = result.columns && check.columns;
    fingerprint.add_number(check.fingerprint);
  }
  result.fingerprint = fingerprint.value();
  return result;
}

float* CpuDevice::scratch(int thread, std::int64_t floats) {
  Buffer& buffer = scratch_[static_cast<std::size_t>(thread)];
  const std::int64_t bytes = floats * size_of(DType::kF32);
  if (buffer.bytes() < bytes) buffer = allocate(bytes);
  return buffer.as<float>();
}

void CpuDevice::tile_rows(const InputRows& x, DType model, std::int64_t columns, const Tiles& out) {
  const DType kept = storage(model);
  const std::int64_t in_bytes = x.stride * size_of(model);
  const std::int64_t out_bytes = out.width * size_of(kept);
  const std::int64_t used_bytes = columns * size_of(kept);
  parallel(out.padded_rows(), [&](std::int64_t row, int) {
    std::byte* to = out.data + row * out_bytes;
    const std::int64_t used = row < out.rows ? used_bytes : 0;
    if (used > 0) {
      const std::byte* from = x.data + (x.index == nullptr ? row : x.index[row]) * in_bytes;
      if (x.scale == nullptr) {
        convert(model, from, kept, to, columns);
      } else {
        scale_row(model, from, x.scale[row], columns, kept, to);
      }
    }
    std::memset(to + used, 0, static_cast<std::size_t>(out_bytes - used));
  });
}

void CpuDevice::untile_rows(const Tiles& in, DType model, std::int64_t columns, std::byte* out,
                            std::int64_t out_stride) {
  const DType kept = storage(model);
  parallel(in.rows, [&](std::int64_t row, int) {
    convert(kept, in.data + row * in.width * size_of(kept), model,
            out + row * out_stride * size_of(model), columns);
  });
}

/// Multiplies one tile by one panel into c [tile_rows, groups*64].
void CpuDevice::multiply(const Weight& weight, const Tiles& in, const Unit& unit, int thread,
                         float* c) {
  const std::int64_t inputs = weight.shape.padded_inputs();
  const std::int64_t columns = unit.groups * kGroup;
  const std::int64_t element = size_of(weight.storage);
  const std::byte* a = in.data + unit.first_row * inputs * element;
  const std::byte* w = weight.data.data() + unit.first_group * kGroup * inputs * element;
  const bool whole = weight.kernel == GemmKernel::kLibraryWhole;
  // One row is our own kernel's in any case: the library takes twice its time.
  const bool plain = weight.kernel == GemmKernel::kPlain || (in.tile_rows == 1 && !whole);
  OnednnGemm* library =
      plain ? nullptr : gemms_.at({{in.tile_rows, inputs, columns, weight.storage}, whole}).get();
  if (library != nullptr) {
    library->run(whole ? 0 : thread, a, w, c);
  } else if (whole) {  // on a CPU that the library has no packed GEMM for
    const std::int64_t group_bytes = inputs * kGroup * element;
    parallel(unit.groups, [&](std::int64_t g, int) {
      plain_gemm(weight.storage, a, in.rows, inputs, w + g * group_bytes, 1, c + g * kGroup,
                 columns);
    });
  } else {
    plain_gemm(weight.storage, a, in.tile_rows, inputs, w, unit.groups, c, columns);
  }
}

/// Panels outer, tiles inner: a panel of the weight is read from memory once.
template <typename Use>
void CpuDevice::gemm_units(const Weight& weight, const Tiles& in, const Use& use) {
  const std::int64_t groups = weight.shape.groups();
  if (in.rows == 0) return;
  if (weight.kernel == GemmKernel::kLibraryWhole) {
    const DenormalsOn guard;
    const std::int64_t ldc = groups * kGroup;
    float* c = scratch(0, in.tile_rows * ldc);
    multiply(weight, in, {0, groups, 0, in.rows}, 0, c);
    // The library used all threads; what follows is shared out by rows.
    parallel(ceil_div(in.rows, kWholeStep), [&](std::int64_t i, int) {
      const std::int64_t first = i * kWholeStep;
      use(Unit{0, groups, first, std::min(kWholeStep, in.rows - first)}, c + first * ldc, ldc);
    });
    return;
  }
  const bool one_width = weight.kernel == GemmKernel::kLibraryPanels && in.tile_rows > 1;
  const std::int64_t panel =
      panel_groups(weight.shape, weight.storage, in.alone && !one_width, threads_);
  const std::int64_t tiles = in.count();
  parallel(ceil_div(groups, panel) * tiles, [&](std::int64_t i, int thread) {
    const std::int64_t first = i / tiles * panel;
    const Unit unit{first, std::min(panel, groups - first), i % tiles * in.tile_rows, in.tile_rows};
    float* c = scratch(thread, in.tile_rows * panel * kGroup);
    multiply(weight, in, unit, thread, c);
    use(unit, c, unit.groups * kGroup);
  });
}

void CpuDevice::gemm_activation(const Weight& weight, const float* bias,
                                const Activation& activation, DType model, const Tiles& x,
                                const Tiles& h) {
  const std::int64_t element = size_of(weight.storage);
  gemm_units(weight, x, [&](const Unit& unit, const float* c, std::int64_t ldc) {
    const std::int64_t first_output = unit.first_group * weight.shape.group_outputs();
    ActivationRows rows;
    rows.c = c;
    rows.rows = unit.rows;
    rows.ld = ldc;
    rows.groups = unit.groups;
    rows.bias = bias == nullptr ? nullptr : bias + unit.first_group * kGroup;
    rows.h = h.data + (unit.first_row * h.width + first_output) * element;
    rows.h_ld = h.width;
    rows.valid = weight.shape.outputs - first_output;
    rows.model = model;
    rows.storage = weight.storage;
    activate_rows(activation, rows);
  });
}

void CpuDevice::gemm_merge(const Weight& weight, const Tiles& h, const Partials& stack, int height,
                           int merges) {
  if (weight.kernel == GemmKernel::kLibraryWhole) {  // one root, made in place
    const DenormalsOn guard;
    if (h.rows > 0) multiply(weight, h, {0, weight.shape.groups(), 0, h.rows}, 0, stack.data);
    return;
  }
  gemm_units(weight, h, [&](const Unit& unit, const float* c, std::int64_t ldc) {
    const std::int64_t rows = std::min(unit.rows, h.rows - unit.first_row);
    for (std::int64_t g = 0; g < unit.groups; ++g) {
      merge_group(stack, height, merges, unit.first_group + g, unit.first_row, rows, c + g * kGroup,
                  ldc);
    }
  });
}

void CpuDevice::sum_roots(const RootSum& sum) {
  const std::int64_t steps = ceil_div(sum.rows, kSumRows);
  parallel(sum.groups * steps, [&](std::int64_t i, int) {
    const std::int64_t first = i % steps * kSumRows;
    sum_group(sum, i / steps, first, std::min(kSumRows, sum.rows - first));
  });
}

void CpuDevice::ungroup(const std::byte* in, DType dtype, std::int64_t rows, std::int64_t columns,
                        std::byte* out) {
  const std::int64_t element = size_of(dtype);
  parallel(rows, [&](std::int64_t row, int) {
    for (std::int64_t first = 0; first < columns; first += kGroup) {
      const std::int64_t n = std::min(kGroup, columns - first);
      const std::int64_t from = (first * rows + row * kGroup) * element;
      std::memcpy(out + (row * columns + first) * element, in + from,
                  static_cast<std::size_t>(n * element));
    }
  });
}

void CpuDevice::gather_rows(std::byte* out, const std::byte* in, const std::int32_t* index,
                            std::int64_t rows, std::int64_t bytes) {
  parallel(rows, [&](std::int64_t row, int) {
    std::memcpy(out + row * bytes, in + index[row] * bytes, static_cast<std::size_t>(bytes));
  });
}

void CpuDevice::router_logits(const LogitRows& io) {
  const std::int64_t across = ceil_div(io.outputs, kLogitOutputs);
  parallel(ceil_div(io.rows, kLogitRows) * across, [&](std::int64_t i, int) {
    sum_logits(io, i / across * kLogitRows, i % across * kLogitOutputs);
  });
}

void CpuDevice::choose_experts(const RouteRule& rule, const float* logits, const float* correction,
                               std::int64_t rows, std::int32_t* ids, float* weights) {
  check(rule);
  parallel(rows, [&](std::int64_t row, int) {
    choose_for_token(rule, logits + row * rule.experts, correction, ids + row * rule.top_k,
                     weights + row * rule.top_k);
  });
}

void CpuDevice::score_logits(const ScoredLogits& io) {
  parallel(io.rows, [&](std::int64_t row, int) {
    score_token(io.score, io.experts, io.logits + row * io.experts, io.scores + row * io.experts,
                io.log_sums + row);
  });
}

void CpuDevice::weigh_rows(const WeighedRows& io) {
  const std::int64_t pieces = ceil_div(io.groups * kGroup, kStepColumns);
  parallel(io.count * pieces,
           [&](std::int64_t i, int) { weigh_columns(io, i / pieces, i % pieces * kStepColumns); });
}

void CpuDevice::combine_rows(const CombinedRows& io) {
  const std::int64_t pieces = ceil_div(io.columns, kStepColumns);
  parallel(io.tokens * pieces, [&](std::int64_t i, int) {
    combine_columns(io, i / pieces, i % pieces * kStepColumns);
  });
}

/// Threads that this process may have under its `ulimit -s`; one needs no other stack.
int most_threads() {
  rlimit stack{};
  if (::getrlimit(RLIMIT_STACK, &stack) != 0) return 1;
  const rlim_t bytes = std::max(stack.rlim_cur, kOtherStackBytes) - kOtherStackBytes;
  return static_cast<int>(std::clamp<rlim_t>(bytes / kRecordBytes, 1, kMaxThreads));
}

}  // namespace

std::unique_ptr<Device> make_cpu_device(int threads) {
  const int wanted = threads > 0 ? threads : omp_get_max_threads();
  const int most = most_threads();
  if (wanted > most) {
    throw Error(ExitCode::kUsage,
                fmt::format("{} threads for one process (more than {} overrun OpenMP's stack); set "
                            "OMP_NUM_THREADS, or --threads, to as many as there are cores",
                            wanted, most));
  }
  return std::make_unique<CpuDevice>(wanted);
}

}  // namespace gatefold
