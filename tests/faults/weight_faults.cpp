#include "tests/faults/weight_faults.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

namespace gatefold {
namespace {

Range shifted(Range range, std::int64_t by) { return {range.begin + by, range.end + by}; }

bool is(const std::optional<TensorRef>& ref, const std::string& name) {
  return ref && ref->name == name;
}

bool is_gate_or_up_matrix(const FfnSpec& spec, const std::string& name) {
  return spec.up.name == name || is(spec.gate, name);
}

bool is_gate_or_up_bias(const FfnSpec& spec, const std::string& name) {
  return is(spec.up_bias, name) || is(spec.gate_bias, name);
}

/// Reads columns of the width I that lie `by` further on: rows of gate and up, columns of down.
HookedSource::Read read_elsewhere(const FfnSpec& spec, std::int64_t by, bool down_too) {
  return [=](const TensorSource& inner, const std::string& name, Range rows, Range cols,
             std::byte* out) {
    const bool bias = is_gate_or_up_bias(spec, name);
    const bool down = down_too && name == spec.down.name;
    if (is_gate_or_up_matrix(spec, name)) rows = shifted(rows, by);
    if (bias || down) cols = shifted(cols, by);
    inner.read(name, rows, cols, out);
  };
}

HookedSource::Read swap_gate_and_up(const FfnSpec& spec) {
  return [=](const TensorSource& inner, const std::string& name, Range rows, Range cols,
             std::byte* out) {
    const bool matrix = is_gate_or_up_matrix(spec, name);
    const std::string& other = name == spec.up.name ? spec.gate->name : spec.up.name;
    inner.read(matrix ? other : name, rows, cols, out);
  };
}

HookedSource::Read multiply_down_bias(const FfnSpec& spec, std::int64_t times) {
  return [=](const TensorSource& inner, const std::string& name, Range rows, Range cols,
             std::byte* out) {
    inner.read(name, rows, cols, out);
    if (!is(spec.down_bias, name)) return;
    const DType dtype = inner.find(name)->dtype;
    std::vector<float> values(static_cast<std::size_t>(rows.size() * cols.size()));
    auto* bytes = reinterpret_cast<std::byte*>(values.data());
    convert(dtype, out, DType::kF32, bytes, std::ssize(values));
    for (float& value : values) value *= static_cast<float>(times);
    convert(DType::kF32, bytes, dtype, out, std::ssize(values));
  };
}

std::string tensor_at(const FfnSpec& spec, const std::string& point) {
  const std::map<std::string, std::optional<TensorRef>> refs{{"up", spec.up},
                                                             {"gate", spec.gate},
                                                             {"down", spec.down},
                                                             {"up_bias", spec.up_bias},
                                                             {"down_bias", spec.down_bias}};
  return refs.at(point).value().name;
}

HookedSource::Read read_as_is() {
  return [](const TensorSource& inner, const std::string& name, Range rows, Range cols,
            std::byte* out) { inner.read(name, rows, cols, out); };
}

}  // namespace

MakeRead weight_fault(const Fault& fault) {
  const bool exchanged = fault.is("shards_exchanged");
  if (fault.is("shards_swapped") || exchanged) {
    return [exchanged](const FfnSpec& spec, Range columns, int rank) {
      const std::int64_t by = rank == 0 ? columns.size() : rank == 1 ? -columns.size() : 0;
      return read_elsewhere(spec, by, exchanged);
    };
  }
  if (fault.is("shard_0_everywhere")) {
    return [](const FfnSpec& spec, Range columns, int) {
      return read_elsewhere(spec, -columns.begin, true);
    };
  }
  if (fault.is("gate_up_swapped")) {
    return [](const FfnSpec& spec, Range, int) { return swap_gate_and_up(spec); };
  }
  if (fault.is("low_bit")) {
    return [fault](const FfnSpec& spec, Range, int rank) {
      return rank == fault.rank ? flip_low_bit({tensor_at(spec, fault.point)}) : read_as_is();
    };
  }
  if (fault.is("bias_per_rank")) {
    return [](const FfnSpec& spec, Range columns, int) {
      return multiply_down_bias(spec, spec.intermediate_size / columns.size());
    };
  }
  return {};
}

HookedSource::Read flip_low_bit(std::set<std::string> tensors) {
  return
      [tensors = std::move(tensors), due = true](const TensorSource& inner, const std::string& name,
                                                 Range rows, Range cols, std::byte* out) mutable {
        inner.read(name, rows, cols, out);
        if (!tensors.contains(name) || !std::exchange(due, false)) return;
        std::vector<std::uint16_t> values(static_cast<std::size_t>(rows.size() * cols.size()));
        std::memcpy(values.data(), out, 2 * values.size());
        const auto magnitude = [](std::uint16_t value) { return value & 0x7fff; };
        const auto smallest = std::ranges::min_element(values, {}, magnitude);
        out[2 * (smallest - values.begin())] ^= std::byte{1};
      };
}

}  // namespace gatefold
