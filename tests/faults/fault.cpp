#include "tests/faults/fault.h"

#include <stdexcept>

namespace gatefold {

Fault parse_fault(const std::string& text) {
  Fault fault;
  std::string rest = text;
  const std::size_t colon = rest.find(':');
  if (colon != std::string::npos) {
    std::size_t used = 0;
    fault.rank = std::stoi(rest.substr(colon + 1), &used);
    if (used != rest.size() - colon - 1) throw std::invalid_argument(text);
    rest.resize(colon);
  }
  const std::size_t at = rest.find('@');
  if (at != std::string::npos) {
    fault.point = rest.substr(at + 1);
    rest.resize(at);
  }
  fault.name = rest;
  return fault;
}

}  // namespace gatefold
