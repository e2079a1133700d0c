#include "launch/convert.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "launch/conversion.h"
#include "launch/job.h"
#include "launch/outputs.h"
#include "launch/progress_line.h"
#include "launch/reading_speed.h"
#include "launch/report.h"
#include "launch/timing.h"
#include "parallel/agreement.h"
#include "runtime/error.h"
#include "runtime/quoted_name.h"
#include "runtime/sized_file.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

/// What ranks do between two agreements: an error on one ends all that soon.
constexpr std::int64_t kRoundBytes = 64 << 20;
constexpr int kTurns = 5;  // of --measure

/// Rank 0's text, on all ranks. Collective.
std::string from_root(Communicator& world, std::string text) {
  auto bytes = static_cast<std::int64_t>(text.size());
  world.broadcast(reinterpret_cast<std::byte*>(&bytes), sizeof(bytes), 0);
  text.resize(static_cast<std::size_t>(bytes));
  world.broadcast(reinterpret_cast<std::byte*>(text.data()), bytes, 0);
  return text;
}

// ---- the files beside the weights ----

struct Companions {
  std::vector<std::string> copied;  // names, sorted
  std::vector<std::string> left;    // and those that don't belong to the model as it will be
};

/// Other copies of the weights, which nobody converts; what names them by the old files; and what
/// is no file of the model's.
bool is_left(const fs::directory_entry& entry) {
  const std::string name = entry.path().filename().string();
  std::error_code error;
  if (name.starts_with('.') || !entry.is_regular_file(error)) return true;
  for (const char* suffix : {".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf",
                             ".onnx", ".h5", ".msgpack", ".ot"}) {
    if (name.ends_with(suffix)) return true;
  }
  return false;
}

Companions companions_of(const Conversion& conversion, const std::string& model) {
  std::vector<std::string> weights = {"config.json", kIndexFile};
  for (const SafetensorsFile& file : conversion.checkpoint().files()) {
    weights.push_back(fs::path(file.path()).filename().string());
  }
  Companions companions;
  std::error_code error;
  fs::directory_iterator entry(model, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (std::ranges::find(weights, name) != weights.end()) continue;
    (is_left(*entry) ? companions.left : companions.copied).push_back(name);
  }
  if (error) {
    throw Error(ExitCode::kNoInput,
                fmt::format("cannot list {} ({}); make it readable", model, error.message()));
  }
  std::ranges::sort(companions.copied);
  std::ranges::sort(companions.left);
  return companions;
}

// ---- copying ----

/// Files that are copied as they are, as if they were one.
class PlainCopy {
 public:
  /// Throws Error 66.
  void add(const std::string& path) {
    OpenedFile file = open_regular_file(path);
    if (!file.problem.empty()) {
      throw Error(ExitCode::kNoInput,
                  fmt::format("cannot open {} ({}); make it readable", path, file.problem));
    }
    const auto bytes = static_cast<std::int64_t>(size_of_file(file.fd.get()));
    files_.push_back({path, std::move(file.fd), bytes});
    bytes_ += bytes;
  }
  std::int64_t bytes() const { return bytes_; }
  std::int64_t bytes(std::size_t file) const { return files_[file].bytes; }
  std::size_t count() const { return files_.size(); }

  /// As Conversion::make: calls `write` with file numbers for shards.
  std::int64_t make(Range part, const Conversion::Write& write) const {
    std::vector<std::byte> piece(
        static_cast<std::size_t>(std::clamp<std::int64_t>(part.size(), 0, kPieceBytes)));
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < files_.size(); begin += files_[i++].bytes) {
      const Range own{std::max<std::int64_t>(part.begin - begin, 0),
                      std::min(part.end - begin, files_[i].bytes)};
      for (std::int64_t at = own.begin; at < own.end; at += kPieceBytes) {
        const std::span out =
            std::span(piece).first(static_cast<std::size_t>(std::min(kPieceBytes, own.end - at)));
        read(files_[i], at, out);
        write(i, at, out);
      }
    }
    return 0;
  }

 private:
  struct File {
    std::string path;
    FileDescriptor fd;
    std::int64_t bytes = 0;
  };
  static void read(const File& file, std::int64_t offset, std::span<std::byte> out) {
    while (!out.empty()) {
      const ssize_t got = ::pread(file.fd.get(), out.data(), out.size(), offset);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) {
        throw Error(ExitCode::kNoInput,
                    fmt::format("cannot read {} ({}); leave it alone while it is read", file.path,
                                got == 0 ? "it shrank" : errno_text(errno)));
      }
      out = out.subspan(static_cast<std::size_t>(got));
      offset += got;
    }
  }

  std::vector<File> files_;
  std::int64_t bytes_ = 0;
};

// ---- writing ----

/// A file that all ranks write parts of.
struct Target {
  std::string name;
  std::int64_t bytes = 0;  // with the head
  std::string head;        // what rank 0 begins it with
};

using Make = std::function<std::int64_t(Range part, const Conversion::Write& write)>;

/// Files of known sizes in one directory, written by all ranks.
class SharedFiles {
 public:
  /// Rank 0 makes them; the others will open those that they write to. Collective.
  SharedFiles(Communicator& world, TemporaryDirectory& folder, const std::vector<Target>& targets)
      : world_(world), folder_(folder), targets_(targets) {
    for (const Target& target : targets_) paths_.push_back(folder_.file(target.name));
    run_agreed(world_, [&] {
      for (std::size_t i = 0; i < targets_.size(); ++i) {
        files_.emplace_back();
        if (world_.rank() != 0) continue;
        files_[i].emplace(SizedFile::make(paths_[i], static_cast<std::uint64_t>(targets_[i].bytes),
                                          folder_.shown(targets_[i].name)));
        files_[i]->write(0, std::as_bytes(std::span(targets_[i].head)));
      }
    });
  }

  /// Writes what `make` makes of `bytes` bytes, each rank its share; the sum of what make() returns
  /// on this rank. Collective.
  std::int64_t fill(std::int64_t bytes, const Make& make, bool quiet) {
    const std::int64_t share = ceil_div(bytes, world_.size());
    const Range own{std::min(bytes, share * world_.rank()),
                    std::min(bytes, share * (world_.rank() + 1))};
    const std::int64_t rounds = ceil_div(share, kRoundBytes);
    ProgressLine line("part", rounds, world_.rank() == 0 && !quiet);
    const auto write = [this](std::size_t file, std::int64_t offset,
                              std::span<const std::byte> made) {
      open(file).write(targets_[file].head.size() + static_cast<std::uint64_t>(offset), made);
      world_.progress().tick();
    };
    std::int64_t sum = 0;
    for (std::int64_t round = 0; round < rounds; ++round) {
      line.begin();
      run_agreed(world_, [&] {
        const std::int64_t begin = std::min(own.end, own.begin + round * kRoundBytes);
        sum += make({begin, std::min(own.end, begin + kRoundBytes)}, write);
      });
    }
    return sum;
  }

  /// Brings them to the disk. Collective.
  void flush() {
    run_agreed(world_, [this] {
      for (const std::optional<SizedFile>& file : files_) {
        if (file) file->flush();
        world_.progress().tick();
      }
    });
  }

  /// Removes them again. Collective.
  void drop() {
    files_.clear();
    run_agreed(world_, [this] {
      for (const Target& target : targets_) folder_.drop(target.name);
    });
  }

 private:
  SizedFile& open(std::size_t i) {
    if (!files_[i]) files_[i].emplace(SizedFile::open(paths_[i], folder_.shown(targets_[i].name)));
    return *files_[i];
  }

  Communicator& world_;
  TemporaryDirectory& folder_;
  std::vector<Target> targets_;
  std::vector<std::string> paths_;
  std::vector<std::optional<SizedFile>> files_;  // those that this rank has open
};

struct Speed {
  double seconds = 0;  // of the whole conversion, flushed
  std::int64_t overflows = 0;
  double converted = 0, copied = 0;     // bytes per second, medians of --measure
  double ratio = 0;                     // likewise
  std::optional<ReadingSpeed> reading;  // of quantised weights
};

class Converter {
 public:
  Converter(const Options& options, Communicator& world) : options_(options), world_(world) {
    world_.progress().enter("set-up");
    run_agreed(world_, [&] {
      conversion_.emplace(options_);
      companions_ = companions_of(*conversion_, options_.model);
      if (world_.rank() == 0) target_ = new_directory(options_.output);
    });
    const auto hash = [](std::uint64_t value) { return fmt::format("{:016x}", value); };
    const std::string& config = conversion_->config().canonical_text;
    require_equal(world_, "a config.json with hash",
                  hash(fingerprint(std::as_bytes(std::span(config)))), ExitCode::kData);
    require_equal(world_, "model files with header hash",
                  hash(conversion_->checkpoint().header_hash()), ExitCode::kData);
    target_ = from_root(world_, target_);
  }

  int run() {
    Report report = header();
    describe(report);
    if (options_.dry_run) {
      report.note(fmt::format("dry run, nothing is written to {}", options_.output));
    } else {
      world_.progress().enter("writing the model");
      Speed speed = write();
      if (options_.measure && options_.dtype) {
        world_.progress().enter("measuring");
        speed.reading = measure_reading(world_, options_.model, options_.output, *options_.dtype);
      }
      note_speed(speed, report);
    }
    publish(world_, options_, report);
    return static_cast<int>(ExitCode::kOk);
  }

 private:
  Speed write();
  void write_companions(TemporaryDirectory& folder, const std::function<void()>& beat) const;
  void measure(TemporaryDirectory& folder, Speed& speed);
  std::vector<Target> targets() const;
  Report header() const;
  void describe(Report& report) const;
  void note_speed(const Speed& speed, Report& report) const;

  const Options& options_;
  Communicator& world_;
  std::optional<Conversion> conversion_;
  Companions companions_;
  std::string target_;
};

std::vector<Target> Converter::targets() const {
  std::vector<Target> targets;
  for (const FolderShard& shard : conversion_->shards()) {
    const std::string path = options_.output + '/' + shard.file;
    SafetensorsHead head = shard.head(path, conversion_->metadata());
    const auto bytes = static_cast<std::int64_t>(head.text.size() + head.data_bytes);
    targets.push_back({shard.file, bytes, std::move(head.text)});
  }
  return targets;
}

Speed Converter::write() {
  Speed speed;
  std::optional<TemporaryDirectory> folder;
  run_agreed(world_, [&] {
    if (world_.rank() == 0) folder.emplace(target_);
  });
  const std::string path = from_root(world_, folder ? folder->path() : "");
  if (world_.rank() != 0) folder.emplace(target_, path);
  std::vector<Target> files;
  run_agreed(world_, [&] { files = targets(); });
  if (options_.measure) measure(*folder, speed);

  const auto make = [this](Range part, const Conversion::Write& write) {
    return conversion_->make(part, write);
  };
  std::optional<SharedFiles> shared;
  speed.seconds = timed(world_, [&] {
    // Known to all ranks, each of which may be the last to remove them.
    for (const std::string& name : companions_.copied) folder->file(name);
    for (const char* name : {"config.json", kIndexFile}) folder->file(name);
    while_root_works(world_, 0,
                     [&](const std::function<void()>& beat) { write_companions(*folder, beat); });
    shared.emplace(world_, *folder, files);
    speed.overflows = shared->fill(conversion_->bytes(), make, options_.quiet);
    shared->flush();
    shared.reset();
    run_agreed(world_, [&] {
      if (world_.rank() == 0) folder->keep();
    });
    folder->release();
  });
  std::vector<std::int64_t> all(static_cast<std::size_t>(world_.size()));
  all[static_cast<std::size_t>(world_.rank())] = speed.overflows;
  all_gather<std::int64_t>(world_, all);
  speed.overflows = 0;
  for (const std::int64_t one : all) speed.overflows += one;
  return speed;
}

void Converter::write_companions(TemporaryDirectory& folder,
                                 const std::function<void()>& beat) const {
  const auto at = [&](const std::string& name) { return folder.path() + '/' + name; };
  for (const std::string& name : companions_.copied) {
    PlainCopy copy;
    copy.add(options_.model + '/' + name);
    const auto bytes = static_cast<std::uint64_t>(copy.bytes());
    const SizedFile file = SizedFile::make(at(name), bytes, folder.shown(name));
    copy.make({0, copy.bytes()},
              [&](std::size_t, std::int64_t offset, std::span<const std::byte> read) {
                file.write(static_cast<std::uint64_t>(offset), read);
                beat();
              });
    file.flush();
  }
  write_file(at("config.json"), conversion_->config_text());
  if (conversion_->shards().size() > 1) {
    write_file(at(kIndexFile), index_text(conversion_->shards()));
  }
}

/// Turns of converting and of copying the model's weights as they are, by the same ranks, into
/// files of the same folder that go away again; neither waits for the disk. One before counts for
/// nothing.
void Converter::measure(TemporaryDirectory& folder, Speed& speed) {
  world_.progress().enter("measuring");
  PlainCopy copy;
  std::vector<Target> copies;
  run_agreed(world_, [&] {
    for (const SafetensorsFile& file : conversion_->checkpoint().files()) {
      copy.add(file.path());
      copies.push_back({fmt::format("copy-{:05}", copies.size()), copy.bytes(copies.size()), ""});
    }
  });
  const std::vector<Target> files = targets();
  const auto turn = [&](const std::vector<Target>& to, std::int64_t bytes, const Make& make) {
    std::optional<SharedFiles> shared;
    const double seconds = timed(world_, [&] {
      shared.emplace(world_, folder, to);
      shared->fill(bytes, make, true);
    });
    shared->drop();
    return seconds;
  };
  std::vector<double> converting, copying;
  const auto convert_once = [&] {
    converting.push_back(turn(files, conversion_->bytes(), [&](Range part, const auto& write) {
      return conversion_->make(part, write);
    }));
  };
  const auto copy_once = [&] {
    copying.push_back(turn(copies, copy.bytes(),
                           [&](Range part, const auto& write) { return copy.make(part, write); }));
  };
  for (int i = 0; i <= kTurns; ++i) {  // who comes second finds more of the disk's queue
    if (i % 2 == 0) convert_once();
    copy_once();
    if (i % 2 == 1) convert_once();
  }
  converting.erase(converting.begin());
  copying.erase(copying.begin());
  // Per byte that is read or written: with --dtype there are more or fewer of the latter.
  const auto moved = static_cast<double>(copy.bytes() + conversion_->bytes()) / 2;
  for (double& seconds : converting) seconds /= moved;
  for (double& seconds : copying) seconds /= static_cast<double>(copy.bytes());
  speed.converted = 1 / median(converting);
  speed.copied = 1 / median(copying);
  speed.ratio = median_ratio(copying, converting);
  world_.progress().enter("writing the model");
}

Report Converter::header() const {
  Report report;
  report.options(options_.echo());
  report.fact("gatefold", GATEFOLD_VERSION);
  report.fact("model", fmt::format("{} ({})", options_.model, conversion_->config().model_type));
  report.fact("weights", conversion_->checkpoint().description());
  report.fact("ranks", fmt::format("{}", world_.size()));
  report.fact("experts", options_.layout
                             ? fmt::format("{}, {} laid out anew", name_of(*options_.layout),
                                           counted(conversion_->relaid_layers(), "layer"))
                             : "as stored");
  report.fact("dtype", options_.dtype ? std::string(name_of(*options_.dtype)) : "as stored");
  report.detail("revision", options_.revision);
  return report;
}

void Converter::describe(Report& report) const {
  report.columns({{"file", "", "file"}, {"tensors", "", "tensors"}, {"size", "B", "bytes"}});
  for (const FolderShard& shard : conversion_->shards()) {
    report.row({Cell::of(shard.file),
                Cell::of(static_cast<double>(shard.tensors.size()),
                         fmt::format("{}", shard.tensors.size())),
                Cell::of(static_cast<double>(shard.bytes), fmt::format("{}", shard.bytes))});
  }
  const auto listed = [](std::vector<std::string> names) {
    constexpr std::size_t kMost = 8;
    for (std::string& name : names) name = printable(name);
    const std::size_t more = names.size() > kMost ? names.size() - kMost : 0;
    names.resize(names.size() - more);
    return fmt::format("{}{}", fmt::join(names, ", "),
                       more > 0 ? fmt::format(" and {} more", more) : "");
  };
  if (!companions_.copied.empty()) {
    report.note("copied as they are: " + listed(companions_.copied));
  }
  if (!companions_.left.empty()) {
    report.note("left behind (hidden, a folder, or other weights): " + listed(companions_.left));
  }
  if (conversion_->kept() > 0) {
    report.note(
        fmt::format("{} kept as stored (correction biases, and what is no f32, bf16 or "
                    "f16)",
                    counted(conversion_->kept(), "tensor")));
  }
}

void Converter::note_speed(const Speed& speed, Report& report) const {
  if (speed.overflows > 0) {
    report.note(fmt::format("{} beyond f16 became infinite (it ends at 65504); bf16 has room",
                            counted(speed.overflows, "value")));
  }
  if (speed.ratio > 0) {
    report.note(fmt::format(
        "converting is {:.2f} times as fast as a plain copy: {} against {} (medians of {} turns "
        "each, of bytes read and written, without waiting for the disk)",
        speed.ratio, human(speed.converted, "B/s"), human(speed.copied, "B/s"), kTurns));
  }
  if (const auto& reading = speed.reading) {
    const std::string_view dtype = name_of(*options_.dtype);
    report.note(fmt::format(
        "reading the quantised weights is {:.2f} times as fast as reading what they are now: {} of "
        "{} against {}; by bytes of files {:.2f} times: {} (medians of {} turns each)",
        reading->ratio, human(reading->quantised, "B/s"), dtype, human(reading->plain, "B/s"),
        reading->stored_ratio, human(reading->quantised_stored, "B/s"), ReadingSpeed::kTurns));
  }
  std::int64_t tensors = 0;
  for (const FolderShard& shard : conversion_->shards()) {
    tensors += static_cast<std::int64_t>(shard.tensors.size());
  }
  const auto bytes = static_cast<double>(conversion_->bytes());
  report.note(fmt::format("{}: {}, {} in {}, {:.3g} s to the disk, {}", options_.output,
                          counted(tensors, "tensor"), human(bytes, "B"),
                          counted(static_cast<std::int64_t>(conversion_->shards().size()), "file"),
                          speed.seconds, human(bytes / speed.seconds, "B/s")));
}

}  // namespace

int convert(const Options& options, Communicator& world) { return Converter(options, world).run(); }

}  // namespace gatefold
