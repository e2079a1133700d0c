// What tests of the program itself share: they run it, alone and under mpirun.
#pragma once

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "runtime/safetensors.h"
#include "tests/build_paths.h"
#include "tests/testing_device.h"

namespace gatefold {

inline const std::string kSource = kSourceFolder;
inline const std::string kProgram = kProgramFile;
inline const std::string kFixture = kSource + "/tests/fixtures/smollm2-135m-instruct";

inline std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Outcome {
  int code = -1;
  std::string out;
  std::string error;

  /// What the program itself said on standard error, without mpirun's words.
  std::vector<std::string> complaints() const {
    std::vector<std::string> lines;
    std::istringstream stream(error);
    for (std::string line; std::getline(stream, line);) {
      if (line.find("gatefold: ") != std::string::npos) lines.push_back(line);
    }
    return lines;
  }
};

/// A folder of its own, and the program run from it.
class Program : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    ::setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    ::setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    ::setenv("OMP_NUM_THREADS", "1", 1);
  }
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) /
              ("gatefold_program_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  /// Runs a shell command under a time limit.
  Outcome shell(const std::string& command) const {
    const std::string script = path("command.sh");
    std::ofstream(script) << command << '\n';
    const std::string whole =
        "timeout 100 bash " + script + " >" + path("out") + " 2>" + path("error") + " </dev/null";
    const int status = std::system(whole.c_str());
    Outcome outcome;
    outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    outcome.out = content_of(path("out"));
    outcome.error = content_of(path("error"));
    return outcome;
  }
  Outcome alone(const std::string& arguments) const {
    return shell(kProgram + " " + arguments + device_of(arguments));
  }
  Outcome on_ranks(int ranks, const std::string& arguments) const {
    return shell(std::string(kMpirun) + " -n " + std::to_string(ranks) + " " + kProgram + " " +
                 arguments + device_of(arguments));
  }
  Outcome on_two(const std::string& rank_0, const std::string& rank_1) const {
    return shell(std::string(kMpirun) + " -n 1 " + kProgram + " " + rank_0 + " : -n 1 " + kProgram +
                 " " + rank_1);
  }

  std::vector<float> read_f32(const std::string& file, const std::string& tensor) const {
    const SafetensorsFile opened(file);
    const SafetensorsEntry& entry = opened.header().tensors.at(tensor);
    EXPECT_EQ(entry.dtype, "F32");
    std::vector<float> values((entry.end - entry.begin) / sizeof(float));
    opened.read(tensor, 0, std::as_writable_bytes(std::span(values)));
    return values;
  }

  /// The tensor in whichever shard of `folder` holds it.
  std::vector<float> find_f32(const std::string& folder, const std::string& tensor) const {
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      if (entry.path().extension() != ".safetensors") continue;
      const std::string file = entry.path().string();
      if (SafetensorsFile(file).header().tensors.contains(tensor)) return read_f32(file, tensor);
    }
    ADD_FAILURE() << "no " << tensor << " in " << folder;
    return std::vector<float>(48);
  }

  void write_tensors(const std::string& file, const std::vector<SafetensorsWriter::Tensor>& tensors,
                     const std::vector<std::vector<float>>& values) const {
    SafetensorsWriter writer(file, tensors);
    for (const auto& one : values) writer.append(std::as_bytes(std::span(one)));
    writer.finish();
  }

  /// H 16, I 4, silu; for x = [1, 0, …] gate i is `gates[i]`, up i is 10 (i + 1), and y[0] the sum
  /// over i of silu(gate i) times up i.
  void write_small_model(const std::vector<float>& gates) const {
    std::filesystem::create_directories(path("model"));
    std::ofstream(path("model/config.json"))
        << R"({"model_type": "llama", "hidden_size": 16, "intermediate_size": 4,
               "num_hidden_layers": 1, "hidden_act": "silu", "torch_dtype": "float32"})";
    std::vector<float> gate(64), up(64), down(64);
    for (std::size_t i = 0; i < 4; ++i) {
      gate[i * 16] = gates[i];
      up[i * 16] = 10.0F * static_cast<float>(i + 1);
      down[i] = 1.0F;
    }
    const std::string mlp = "model.layers.0.mlp.";
    write_tensors(path("model/model.safetensors"),
                  {{mlp + "gate_proj.weight", "F32", {4, 16}},
                   {mlp + "up_proj.weight", "F32", {4, 16}},
                   {mlp + "down_proj.weight", "F32", {16, 4}}},
                  {gate, up, down});
  }
  void write_tokens(const std::vector<float>& x, std::int64_t hidden) const {
    const auto tokens = static_cast<std::int64_t>(x.size()) / hidden;
    write_tensors(path("x.safetensors"), {{"x", "F32", {tokens, hidden}}}, {x});
  }

 private:
  /// The device under test, for a command that takes one.
  static std::string device_of(const std::string& arguments) {
    const std::string command = arguments.substr(0, arguments.find(' '));
    const bool computes = command == "verify" || command == "run" || command == "bench" ||
                          command == "inspect" || command == "balance";
    if (!gatefold::testing::on_cuda() || !computes) return "";
    // Stand-ins take long to read as much as no cache holds.
    const bool cold = command == "bench" && arguments.find("--hot") == std::string::npos &&
                      arguments.find("--machine") == std::string::npos;
    return std::string(" --device cuda --comm mpi") + (cold ? " --hot" : "");
  }

  std::filesystem::path folder_;
};

inline void expect_one_complaint(const Outcome& outcome, int code, const std::string& says) {
  EXPECT_EQ(outcome.code, code) << outcome.error;
  const std::vector<std::string> lines = outcome.complaints();
  ASSERT_EQ(lines.size(), 1U) << outcome.error;
  EXPECT_THAT(lines[0], ::testing::HasSubstr(says));
  EXPECT_TRUE(lines[0].starts_with("gatefold: ")) << lines[0];
  EXPECT_THAT(outcome.out, ::testing::IsEmpty());
}

}  // namespace gatefold
