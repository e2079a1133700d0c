#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch/drop_check.h"
#include "launch/job.h"
#include "layers/moe_spec.h"

namespace gatefold {

/// Rows that the experts of a layer get of some tokens: [E], k of each token in all.
using ExpertRows = std::vector<std::int64_t>;

/// The largest part ÷ the mean; 1 is even, and E where one expert gets all.
double max_over_mean(const ExpertRows& rows);
/// Of the experts' shares, in bits: log2 E where they are even, 0 where one gets all.
double entropy_bits(const ExpertRows& rows);
/// The same ÷ log2 E; 1 where there is one expert only.
double entropy_share(const ExpertRows& rows);
std::int64_t experts_without(const ExpertRows& rows);

/// A line for each expert, or for each few neighbours where there are many: who, how many rows, and
/// a bar. The longest bar is the largest line's.
std::vector<std::string> load_histogram(const ExpertRows& rows);

/// Where the layer's router sends the batch, and what of it its capacity drops.
struct ExpertLoad {
  ExpertRows rows;  // before any is dropped
  DropCount drops;
};
/// Over all ranks; no expert is read. Collective.
ExpertLoad find_expert_load(const Job& job, const MoeSpec& spec, const TokenBatch& batch);

}  // namespace gatefold
