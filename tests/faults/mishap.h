#pragma once

#include "tests/faults/fault.h"

namespace gatefold {

/// What may happen to a process: kill, stop (as by SIGSTOP), segfault, exit (0, without a word to
/// MPI), throw, sleep (1.5 s), linger (30 s).
bool is_mishap(const Fault& fault);

/// Lets it happen here, after a line on stderr that says so.
void happen(const Fault& fault);

}  // namespace gatefold
