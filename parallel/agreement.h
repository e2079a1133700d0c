#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "parallel/communicator.h"
#include "runtime/error.h"

namespace gatefold {

/// An error that every rank of a group throws, so that nobody waits for another.
class AgreedError : public Error {
 public:
  using Error::Error;
};

/// Runs `step` on every rank and closes it together: if it threw on any rank, every rank throws
/// the error of the lowest such rank (of those with 75 only where no other has one), so that all
/// end with one code and one message. A NoAnswerError goes on at once, as this rank's own.
/// Collective; `step` itself may be too, as long as an Error in it can't leave peers inside.
void run_agreed(Communicator& comm, const std::function<void()>& step);

/// Every rank gives its `value` for what `name` names; throws Error 64 on all, with both values and
/// who gave them, unless all are equal. Collective.
void require_equal(Communicator& comm, const std::string& name, const std::string& value,
                   ExitCode code = ExitCode::kUsage);

/// True where it is true on every rank. Collective.
bool all_true(Communicator& comm, bool mine);

/// The root works alone while the others sleep; `beat` must be called now and then (it sends a sign
/// of life at most once a second). An error of the root ends in the same error on all ranks.
/// Collective.
void while_root_works(Communicator& comm, int root,
                      const std::function<void(const std::function<void()>& beat)>& work);

}  // namespace gatefold
