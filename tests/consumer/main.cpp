// A dense layer of a checkpoint and a mixture of experts inside someone else's MPI program.
#include <gatefold/layers/mlp.h>
#include <gatefold/layers/model_config.h>
#include <gatefold/layers/model_files.h>
#include <gatefold/layers/moe.h>
#include <gatefold/layers/seeded_source.h>
#include <gatefold/parallel/grid.h>
#include <gatefold/parallel/mpi_interop.h>
#include <gatefold/runtime/error.h>
#include <mpi.h>

#include <cstdio>
#include <vector>

static unsigned long long hash_of(const std::vector<std::uint16_t>& y) {
  unsigned long long hash = 14695981039346656037ULL;
  for (const std::uint16_t bits : y) hash = (hash ^ bits) * 1099511628211ULL;
  return hash;
}

static std::vector<std::uint16_t> ones(std::int64_t values) {
  return std::vector<std::uint16_t>(static_cast<std::size_t>(values),
                                    gatefold::float_to_bf16(1.0F));
}

// Bits of the output that this group of ranks computes for `tokens` rows of ones.
static unsigned long long run_layer(const char* directory, MPI_Comm comm, std::int64_t tokens) {
  const auto config = gatefold::read_model_config(std::string(directory) + "/config.json");
  const auto files = gatefold::open_model_files(directory, config);
  const auto spec = gatefold::resolve_layer(config, 0, *files.source);

  const auto device = gatefold::make_cpu_device();
  const auto tp = gatefold::make_mpi_communicator(comm);  // duplicates comm
  gatefold::MlpOptions options;
  options.linear.dtype = gatefold::DType::kBf16;
  gatefold::Mlp mlp(spec, *files.source, {device.get(), tp.get()}, options);

  const std::vector<std::uint16_t> x = ones(tokens * spec.hidden_size);
  std::vector<std::uint16_t> y(x.size());
  mlp.reserve({tokens, tokens});  // from here on forward allocates nothing
  mlp.forward(reinterpret_cast<const std::byte*>(x.data()), {tokens, tokens},
              reinterpret_cast<std::byte*>(y.data()));

  return hash_of(y);
}

// Bits of the output for `tokens` rows of ones, the same on every rank: each holds all of them.
static unsigned long long run_experts(const char* config_file, MPI_Comm comm, std::int64_t tokens) {
  const auto config = gatefold::read_model_config(config_file);
  const gatefold::SeededSource weights(config, 0);
  const auto spec = gatefold::resolve_moe(config, 0, weights);

  const auto device = gatefold::make_cpu_device();
  const auto world = gatefold::make_mpi_communicator(comm);
  const gatefold::Grid grid(*world, world->size(), world->size());  // tp and ep
  gatefold::MoeOptions options;
  options.linear.dtype = gatefold::DType::kBf16;
  gatefold::Moe moe(spec, weights, {device.get(), world.get(), &grid.tp(), &grid.etp()}, options);

  const std::vector<std::uint16_t> x = ones(tokens * spec.hidden_size);
  std::vector<std::uint16_t> y(x.size());
  moe.reserve({tokens, tokens});
  moe.forward(reinterpret_cast<const std::byte*>(x.data()), {tokens, tokens},
              reinterpret_cast<std::byte*>(y.data()));
  return hash_of(y);
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  int status = 0;
  try {
    // The whole world shares the layer; then every rank runs it alone. The bits must not differ.
    const auto together = run_layer(argv[1], MPI_COMM_WORLD, 5);
    const auto alone = run_layer(argv[1], MPI_COMM_SELF, 5);
    const auto experts_together = run_experts(argv[2], MPI_COMM_WORLD, 5);
    const auto experts_alone = run_experts(argv[2], MPI_COMM_SELF, 5);
    status = together == alone && experts_together == experts_alone ? 0 : 1;
    std::printf("rank %d: %016llx together, %016llx alone; experts %016llx, %016llx\n", rank,
                together, alone, experts_together, experts_alone);
  } catch (const gatefold::Error& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    MPI_Abort(MPI_COMM_WORLD, static_cast<int>(error.code()));
  }
  MPI_Finalize();
  return status;
}
