#pragma once

#include "launch/options.h"
#include "launch/report.h"
#include "parallel/communicator.h"

namespace gatefold {

/// Throws Error 64 where an output is an input, a file of the model, standard output (as this
/// process has it: mpirun's own is out of sight) or another output under whatever name, links and
/// files that are not there yet included; 74 where it can't be written. A long run must end neither
/// in a lost result nor in a lost model.
void check_outputs(const Options& options);

/// Rank 0 prints the report (--quiet: its closing notes) and writes --json and --csv. Agreed: a
/// file that can't be written is an Error 74 on all ranks. Collective.
void publish(Communicator& world, const Options& options, const Report& report);

}  // namespace gatefold
