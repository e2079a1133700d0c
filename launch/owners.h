#pragma once

#include "launch/job.h"

namespace gatefold {

/// Notes on which rank owns what of layers like this one, by --tp, --ep and --expert-blocks or else
/// as this world would be cut. Throws Error 64 where ranks would be more than blocks.
void add_owners(const Job& job, const LayerSpec& spec, Report& report);

}  // namespace gatefold
