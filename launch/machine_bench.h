#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "launch/machine.h"
#include "launch/options.h"
#include "launch/report.h"
#include "parallel/communicator.h"
#include "parallel/device_communicator.h"
#include "runtime/device.h"

namespace gatefold {

/// bench --machine: GEMM peaks, memory, messages and collectives, of one rank and of all at once,
/// and what the runtime does in collectives' place. Needs no model.
class MachineBench {
 public:
  /// Makes the device, and what carries its tensors. Collective over `world`, which must outlive
  /// it.
  MachineBench(const Options& options, Communicator& world);

  /// The exit code of a finished job; errors are thrown. Collective.
  int run();

 private:
  /// What a row's rates are made of.
  struct Measured {
    std::string what;
    std::string how;
    int ranks = 1;
    double bytes = 0;  // 0: none to speak of
    std::vector<double> seconds;
  };
  struct Pair {
    std::string how;
    int peer = 0;
  };

  void time_device();
  void time_gemms();
  void time_memory();
  void time_pairs();
  void time_all_reduce(Buffer& memory);
  void time_all_to_all(Buffer& out, Buffer& in);
  void time_movements();
  std::vector<Pair> find_pairs();
  void time_pair(const Pair& pair);
  void time_window(Communicator& both, bool takes_part, const Pair& pair, Buffer& memory);
  Load round_trip(Communicator& pair, Buffer& memory, std::int64_t bytes);

  std::vector<int> one_and_all() const;
  Load agreed_load(bool takes_part, const std::function<Load()>& make);
  std::vector<double> time(bool takes_part, const Load& load);
  void add_gemm(const Measured& one, double flops);
  void add_memory(const Measured& one, double bytes);
  void add_message(const Measured& one, double share, Cell times_library = Cell::of("-"));
  void add_row(const Measured& one, Cell tflops, Cell algbw, Cell busbw,
               Cell times_library = Cell::of("-"));
  Report header();

  const Options& options_;
  Communicator& world_;
  std::unique_ptr<Device> device_;
  CommChoice choice_;
  std::unique_ptr<Communicator> on_device_;
  Communicator* comm_ = nullptr;  // for tensors of the device
  int ranks_a_host_ = 1;          // on the host with the fewest
  Report report_;
};

}  // namespace gatefold
