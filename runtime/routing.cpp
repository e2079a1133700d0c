#include "runtime/routing.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/error.h"

namespace gatefold {

void check(const RouteRule& rule) {
  if (rule.experts < 1 || rule.experts > kMaxExperts || rule.top_k < 1 ||
      rule.top_k > std::min(rule.experts, kMaxTopK)) {
    throw Error(ExitCode::kData,
                fmt::format("{} of {} experts for a token (there may be {} of at most {}, and no "
                            "more than the layer has); check the model's config",
                            rule.top_k, rule.experts, kMaxTopK, kMaxExperts));
  }
  if (rule.groups < 1 || rule.experts % rule.groups != 0 || rule.kept_groups < 1 ||
      rule.kept_groups > rule.groups) {
    throw Error(ExitCode::kData,
                fmt::format("{} of {} groups of {} experts (groups have to be of one size, and at "
                            "least one is kept); check the model's config",
                            rule.kept_groups, rule.groups, rule.experts));
  }
}

}  // namespace gatefold
