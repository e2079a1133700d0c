#pragma once

#include "launch/options.h"
#include "parallel/communicator.h"

namespace gatefold {

/// `convert`: writes --model to the directory --output in another layout of its experts, another
/// number of files or another type. Ranks share the bytes, and what comes out doesn't depend on how
/// many they are. It is there whole or not at all. Throws what Conversion does, and Error 74.
/// The exit code of a finished job. Collective.
int convert(const Options& options, Communicator& world);

}  // namespace gatefold
