#pragma once

#include <functional>
#include <utility>

#include "runtime/tensor_source.h"

namespace gatefold {

/// A source whose reads go through a function, which may read something else or not return.
class HookedSource final : public TensorSource {
 public:
  using Read = std::function<void(const TensorSource& inner, const std::string& name, Range rows,
                                  Range cols, std::byte* out)>;

  HookedSource(const TensorSource& inner, Read read) : inner_(inner), read_(std::move(read)) {}

  std::optional<TensorInfo> find(const std::string& name) const override {
    return inner_.find(name);
  }
  void read(const std::string& name, Range rows, Range cols, std::byte* out) const override {
    read_(inner_, name, rows, cols, out);
  }
  std::string description() const override { return inner_.description(); }

 private:
  const TensorSource& inner_;
  Read read_;
};

}  // namespace gatefold
