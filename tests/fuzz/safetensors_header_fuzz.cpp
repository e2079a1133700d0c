#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "runtime/error.h"
#include "runtime/safetensors.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

/// What every accepted header promises to the code that reads by it.
void check(const gatefold::SafetensorsHeader& header, std::string_view json,
           std::uint64_t data_bytes) {
  require(header.data_start == 8 + json.size());
  std::uint64_t sum = 0;
  std::uint64_t furthest = 0;
  for (const auto& [name, entry] : header.tensors) {
    require(!entry.dtype.empty());
    require(entry.begin <= entry.end && entry.end <= data_bytes);
    require(std::ranges::all_of(entry.shape, [](std::int64_t d) { return d >= 0; }));
    sum += entry.end - entry.begin;
    furthest = std::max(furthest, entry.end);
  }
  require(sum == data_bytes && furthest == data_bytes);
}

}  // namespace

/// The first eight bytes choose how many bytes of data lie behind the header.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  std::uint64_t data_bytes = 0;
  if (size < sizeof data_bytes) return 0;
  std::memcpy(&data_bytes, bytes, sizeof data_bytes);
  const std::string_view json(reinterpret_cast<const char*>(bytes) + sizeof data_bytes,
                              size - sizeof data_bytes);
  try {
    check(gatefold::parse_safetensors_header(json, data_bytes, "input"), json, data_bytes);
  } catch (const gatefold::Error& error) {
    require(error.code() == gatefold::ExitCode::kData);
    require(std::string_view(error.what()).size() < 2000);
  }
  return 0;
}
