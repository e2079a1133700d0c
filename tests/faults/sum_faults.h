#pragma once

#include "tests/faults/fault.h"
#include "tests/faults/hooked_communicator.h"

namespace gatefold {

/// Faults of the sum over the group, one a name:
///   sum_skipped       each rank adds its own roots only
///   sum_twice         what the other ranks send is added twice
///   order_changed     one rank adds the roots of the others in another order
///   one_rank_dropped  what the fault's rank sends counts for nothing
///   message_halved    one rank sends half of each message
///   exchange_left_out one rank goes on without the exchange
/// Empty where the fault isn't one of these.
HookedCommunicator::Exchange sum_fault(const Fault& fault);

}  // namespace gatefold
