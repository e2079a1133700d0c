// What all ranks compare with is computed by one of them: cores are few.
#pragma once

#include <mpi.h>

#include <vector>

namespace gatefold::testing {

inline bool is_rank_0() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank == 0;
}

/// Collective: rank 0's values on all ranks of the world.
template <typename T>
void from_rank_0(std::vector<T>& values) {
  auto count = static_cast<int>(values.size());
  MPI_Bcast(&count, 1, MPI_INT, 0, MPI_COMM_WORLD);
  values.resize(static_cast<std::size_t>(count));
  MPI_Bcast(values.data(), count * static_cast<int>(sizeof(T)), MPI_BYTE, 0, MPI_COMM_WORLD);
}

}  // namespace gatefold::testing
