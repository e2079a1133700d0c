#pragma once

#include <string>
#include <string_view>

// What the environment asks of the stand-ins: GATEFOLD_FAKE_GPU_<NAME>, per rank ("8,1:0": 8, but 0
// on rank 1), and faults.

namespace gatefold_fake {

int rank();
long long setting(const std::string& name, long long fallback);
/// Counts one call of `point`; true if GATEFOLD_FAKE_GPU_FAIL wants this one to fail. Its value is
/// a list such as "malloc:3@1,launch:2": the third on rank 1, the second on every rank. Those of
/// GATEFOLD_FAKE_GPU_KILL and _STOP send the process that signal instead.
bool fault(std::string_view point);
/// One line on stderr, after the rank.
void complain(const std::string& text);

}  // namespace gatefold_fake
