#include "launch/outputs.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "parallel/agreement.h"
#include "runtime/error.h"
#include "runtime/quoted_name.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

/// A file however it is named: by its number where it is there, else by where it would lie.
struct FileIdentity {
  fs::path path;  // links followed; empty: unknown
  dev_t device = 0;
  ino_t number = 0;  // 0: it isn't there

  explicit FileIdentity(const std::string& name) {
    std::error_code error;
    path = fs::weakly_canonical(fs::absolute(name, error), error);
    if (!path.has_filename()) path = path.parent_path();  // a directory's last slash
    struct stat status {};
    if (::stat(name.c_str(), &status) == 0) *this = FileIdentity(status, std::move(path));
  }
  explicit FileIdentity(int fd) {
    struct stat status {};
    if (::fstat(fd, &status) == 0) *this = FileIdentity(status, {});
  }
  bool operator==(const FileIdentity& other) const {
    return (!path.empty() && path == other.path) ||
           (number != 0 && number == other.number && device == other.device);
  }

 private:
  FileIdentity(const struct stat& status, fs::path where)
      : path(std::move(where)), device(status.st_dev), number(status.st_ino) {}
};

/// What no output may be, each with what it is.
using Taken = std::vector<std::pair<FileIdentity, std::string>>;

bool is_model_file(const std::string& name) {
  return name == "config.json" || name == "model.safetensors.index.json" ||
         name.ends_with(".safetensors");
}

/// In the directory, or elsewhere under another name.
void add_model_files(const std::string& directory, Taken& taken) {
  std::error_code error;
  fs::directory_iterator entry(directory, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    if (!is_model_file(entry->path().filename().string())) continue;
    taken.emplace_back(FileIdentity(entry->path().string()), "a file of the model");
  }
}

[[noreturn]] void refuse(std::string_view option, const std::string& path,
                         const std::string& problem) {
  throw Error(ExitCode::kUsage,
              fmt::format("{} {} {}; choose another path", option, quoted_name(path), problem));
}

Taken taken_by_inputs(const Options& o) {
  Taken taken;
  taken.emplace_back(FileIdentity(STDOUT_FILENO), "standard output");
  taken.emplace_back(FileIdentity(STDERR_FILENO), "standard error");
  if (!o.config.empty()) taken.emplace_back(FileIdentity(o.config), "the --config file");
  for (const std::string& config : o.sweep.configs) {
    taken.emplace_back(FileIdentity(config), "the --config file");
  }
  if (!o.input.empty()) taken.emplace_back(FileIdentity(o.input), "the --input file");
  for (const std::string& model : {o.model, o.from_dense}) {
    if (!model.empty()) add_model_files(model, taken);
  }
  return taken;
}

/// A model is written beside its directory's name, which must not be in the one that is read.
void refuse_within_model(const Options& o) {
  const FileIdentity model(o.model);
  const FileIdentity output(o.output);
  for (fs::path path = output.path; !path.empty(); path = path.parent_path()) {
    if (FileIdentity(path.string()) == model) {
      refuse("--output", o.output,
             path == output.path ? "is the --model directory" : "is within the --model directory");
    }
    if (path == path.parent_path()) break;
  }
}

}  // namespace

void check_outputs(const Options& o) {
  const bool converts = o.command == Command::kConvert;
  const bool makes_model = converts || o.command == Command::kMakeModel;
  if (converts) refuse_within_model(o);
  const std::string& model = makes_model ? o.output : o.model;
  Taken taken = taken_by_inputs(o);
  for (const auto& [option, path] :
       {std::pair<std::string_view, const std::string&>{"--output", o.output},
        {"--json", o.json},
        {"--csv", o.csv}}) {
    if (path.empty()) continue;
    FileIdentity file(path);
    for (const auto& [other, what] : taken) {
      if (file != other) continue;
      refuse(option, path, fmt::format("is {} (an output takes the place of its file)", what));
    }
    if (!model.empty() && is_model_file(file.path.filename().string()) &&
        FileIdentity(file.path.parent_path()) == FileIdentity(model)) {
      refuse(option, path,
             "would be a file of the model (the next start would take it for one, by its name)");
    }
    taken.emplace_back(std::move(file), fmt::format("the same as {}", option));
  }
  for (const std::string& path : {makes_model ? std::string() : o.output, o.json, o.csv}) {
    if (!path.empty()) require_writable(path);
  }
}

void publish(Communicator& world, const Options& options, const Report& report) {
  run_agreed(world, [&] {
    if (world.rank() != 0) return;
    const std::string text = options.quiet ? report.closing_text() : report.text();
    if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() ||
        std::fflush(stdout) != 0) {
      throw Error(ExitCode::kOutput,
                  "the report can't be printed (standard output is closed or "
                  "full); use --json or --csv");
    }
    if (!options.json.empty()) write_file(options.json, report.json());
    if (!options.csv.empty()) write_file(options.csv, report.csv());
  });
}

}  // namespace gatefold
