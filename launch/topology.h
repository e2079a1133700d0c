#pragma once

#include "launch/options.h"
#include "launch/report.h"
#include "parallel/communicator.h"
#include "runtime/device.h"

namespace gatefold {

/// Facts for a report that says how fast something was: "cpu" (model, sockets, cores, NUMA nodes,
/// last-level cache, of rank 0's machine), "hosts" (which ranks on which) and "cores" (which ones
/// each rank may use), and "crowded" where their threads are more than those. What a machine
/// doesn't tell is left out. Collective.
void add_topology(Communicator& world, const Device& device, const Options& options,
                  Report& report);

}  // namespace gatefold
