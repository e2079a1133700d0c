#pragma once

#include <memory>
#include <string>

#include "launch/options.h"
#include "parallel/communicator.h"
#include "runtime/device.h"

namespace gatefold {

/// The device that --device names, or a GPU where every rank sees one. Agreed. Collective.
std::unique_ptr<Device> make_device(const Options& options, Communicator& world);

/// Why --device auto has taken the CPU, where the build could do otherwise; for a report.
std::string why_no_gpu(const Options& options, const Device& device);

}  // namespace gatefold
