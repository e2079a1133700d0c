#pragma once

#include "launch/job.h"

namespace gatefold {

/// The whole program: parses, starts MPI, runs the command, prints errors once, ends all ranks with
/// one code. `seams` is empty but for fault tests. `revision`: of the sources, for reports.
int run_program(int argc, char** argv, const Seams& seams = {},
                const std::string& revision = "unknown");

}  // namespace gatefold
