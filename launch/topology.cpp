#include "launch/topology.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <utility>

#include "runtime/memory_stream.h"
#include "runtime/quoted_name.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

/// Where a rank runs, as it travels.
struct Spot {
  char host[64];
  cpu_set_t cores;
  std::int64_t threads;
};

Spot own_spot(std::int64_t threads) {
  Spot spot;
  std::memset(&spot, 0, sizeof(spot));
  spot.threads = threads;
  gethostname(spot.host, sizeof(spot.host) - 1);
  CPU_ZERO(&spot.cores);
  sched_getaffinity(0, sizeof(spot.cores), &spot.cores);
  return spot;
}

std::string cores_text(const cpu_set_t& cores) {
  std::vector<std::int64_t> numbers;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(static_cast<std::size_t>(core), &cores)) numbers.push_back(core);
  }
  return numbers.empty() ? "unknown" : layer_text(numbers);
}

/// "0-1: vm; 2-3: other", runs of ranks for which `text` is the same.
template <typename Text>
std::string by_rank(const std::vector<Spot>& spots, const Text& text) {
  std::string all;
  for (std::size_t first = 0; first < spots.size();) {
    std::size_t end = first + 1;
    while (end < spots.size() && text(spots[end]) == text(spots[first])) ++end;
    const bool one = end == first + 1;
    all += fmt::format("{}{} {}{}: {}", first == 0 ? "" : "; ", one ? "rank" : "ranks", first,
                       one ? "" : fmt::format("-{}", end - 1), text(spots[first]));
    first = end;
  }
  return all;
}

/// "3 threads on 2 cores of vm", of hosts whose ranks have more threads than cores.
std::string crowded_text(const std::vector<Spot>& spots) {
  struct Host {
    std::int64_t threads = 0;
    cpu_set_t cores{};
  };
  std::map<std::string, Host> hosts;
  for (const Spot& spot : spots) {
    Host& host = hosts[spot.host];
    host.threads += spot.threads;
    CPU_OR(&host.cores, &host.cores, &spot.cores);
  }
  std::string all;
  for (const auto& [name, host] : hosts) {
    const std::int64_t cores = CPU_COUNT(&host.cores);
    if (cores == 0 || host.threads <= cores) continue;
    all += fmt::format("{}{} on {} of {}", all.empty() ? "" : ", ", counted(host.threads, "thread"),
                       counted(cores, "core"), name);
  }
  return all;
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name")) continue;
    const std::size_t colon = line.find(": ");
    return colon == std::string::npos ? "" : line.substr(colon + 2);
  }
  return "";
}

/// How many entries of a folder are called PREFIX and a number.
std::int64_t numbered_entries(const std::string& folder, const std::string& prefix) {
  std::int64_t count = 0;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const std::string number = name.starts_with(prefix) ? name.substr(prefix.size()) : "";
    if (!number.empty() && number.find_first_not_of("0123456789") == std::string::npos) ++count;
  }
  return count;
}

std::string cpu_text() {
  const std::string folder = "/sys/devices/system/";
  std::set<std::int64_t> sockets;
  std::set<std::pair<std::int64_t, std::int64_t>> cores;
  const long threads = ::sysconf(_SC_NPROCESSORS_CONF);
  for (long cpu = 0; cpu < threads; ++cpu) {
    const std::string topology = fmt::format("{}cpu/cpu{}/topology/", folder, cpu);
    std::int64_t socket = 0;
    std::int64_t core = 0;
    if (!(std::ifstream(topology + "physical_package_id") >> socket)) continue;
    if (!(std::ifstream(topology + "core_id") >> core)) continue;
    sockets.insert(socket);
    cores.emplace(socket, core);
  }
  std::string text = cpu_model();
  const auto add = [&text](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (!sockets.empty()) add(counted(std::ssize(sockets), "socket"));
  if (!cores.empty()) add(counted(std::ssize(cores), "core"));
  add(counted(threads, "hardware thread"));
  const std::int64_t nodes = numbered_entries(folder + "node", "node");
  if (nodes > 0) add(counted(nodes, "NUMA node"));
  const long cache = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (cache > 0) add(fmt::format("last-level cache {} MiB", cache >> 20));
  return text;
}

}  // namespace

void add_topology(Communicator& world, const Device& device, const Options& options,
                  Report& report) {
  const int threads =
      device.in_host_memory() ? team_size(static_cast<int>(options.threads)) : 1;  // that compute
  std::vector<Spot> spots(static_cast<std::size_t>(world.size()));
  spots[static_cast<std::size_t>(world.rank())] = own_spot(threads);
  all_gather<Spot>(world, spots);
  report.fact("cpu", cpu_text());
  report.fact("hosts", by_rank(spots, [](const Spot& s) { return std::string(s.host); }));
  report.fact("cores", by_rank(spots, [](const Spot& s) { return cores_text(s.cores); }));
  const std::string crowded = crowded_text(spots);
  if (crowded.empty()) return;
  report.fact("crowded", crowded + ", so that times say little of the machine; see launch/run");
}

}  // namespace gatefold
