#include <dlfcn.h>
#include <mpi.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

// Between the program and MPI: preloaded into it, alters what one rank's MPI does, as told by
// GATEFOLD_ALTER=<how>:<function>:<k>, the k-th call of that function on rank 1 (MPI_Isend: of
// those with a payload, so that the sums themselves are hit and not the agreements around them):
//   flip     the message goes out with one bit changed (MPI_Isend only)
//   poke     the same with one number changed, by GATEFOLD_POKE=<bytes>:<offset>:<value>: of
//            messages of just so many bytes the k-th has the int32 `value` at `offset`
//   fail     the call does nothing but return MPI_ERR_OTHER
//   kill, stop   the process is killed or stopped in place of the call (rename and pwrite, too)
//   wait     the call comes half a minute late
// or GATEFOLD_ALTER=funneled: MPI_Init_thread grants no more than MPI_THREAD_FUNNELED, on all
// ranks.
namespace {

constexpr int kPayloadBytes = 4096;

struct Order {
  std::string how;
  std::string function;
  int call = 1;
  int rank = 1;
};

Order read_order() {
  Order order;
  const char* text = std::getenv("GATEFOLD_ALTER");
  std::istringstream words(text == nullptr ? "" : text);
  std::string number;
  std::getline(words, order.how, ':');
  std::getline(words, order.function, ':');
  if (std::getline(words, number, ':')) order.call = std::stoi(number);
  if (std::getline(words, number, ':')) order.rank = std::stoi(number);
  return order;
}

const Order& order() {
  static const Order value = read_order();
  return value;
}

bool on_the_rank() {
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  return rank != nullptr && std::atoi(rank) == order().rank;
}

struct Poke {
  int bytes = 0;
  int offset = 0;
  std::int32_t value = 0;
};

const Poke& poke() {
  static const Poke value = [] {
    Poke read;
    char colon = ':';
    const char* text = std::getenv("GATEFOLD_POKE");
    std::istringstream(text == nullptr ? "" : text) >> read.bytes >> colon >> read.offset >>
        colon >> read.value;
    return read;
  }();
  return value;
}

/// True for the call that the order names. The program makes no MPI call in two threads at once
/// but MPI_Abort, which isn't altered.
bool is_due(const char* function) {
  static std::atomic<int> calls{0};
  if (order().function != function || !on_the_rank()) return false;
  if (++calls != order().call) return false;
  std::fprintf(stderr, "[rank %d] planted: %s in %s\n", order().rank, order().how.c_str(),
               function);
  return true;
}

/// True where the call is to fail.
bool altered(const char* function) {
  if (order().how == "flip" || order().how == "poke" || !is_due(function)) return false;
  if (order().how == "kill") std::raise(SIGKILL);
  if (order().how == "stop") std::raise(SIGSTOP);
  if (order().how == "wait") std::this_thread::sleep_for(std::chrono::seconds(30));
  return order().how == "fail";
}

/// A copy of the message that may be changed. Lives as long as the process.
char* copied(const void* data, int bytes) {
  static std::vector<std::unique_ptr<char[]>> kept;
  kept.push_back(std::make_unique<char[]>(static_cast<std::size_t>(bytes)));
  char* copy = kept.back().get();
  std::memcpy(copy, data, static_cast<std::size_t>(bytes));
  return copy;
}

/// The message with its bit flipped: the highest of the mantissa of a float, the lowest but six of
/// a bf16, both of which a sum that is rounded to bf16 shows.
const void* flipped(const void* data, int bytes) {
  char* copy = copied(data, bytes);
  copy[2] = static_cast<char>(copy[2] ^ 0x40);
  return copy;
}

const void* poked(const void* data, int bytes) {
  char* copy = copied(data, bytes);
  std::memcpy(copy + poke().offset, &poke().value, sizeof(poke().value));
  return copy;
}

}  // namespace

int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
  if (altered("MPI_Init_thread")) return MPI_ERR_OTHER;
  if (order().how == "funneled") required = MPI_THREAD_FUNNELED;
  const int status = PMPI_Init_thread(argc, argv, required, provided);
  if (order().how == "funneled") *provided = MPI_THREAD_FUNNELED;
  return status;
}

int MPI_Finalize() {
  if (altered("MPI_Finalize")) return MPI_ERR_OTHER;
  return PMPI_Finalize();
}

int MPI_Comm_rank(MPI_Comm comm, int* rank) {
  if (altered("MPI_Comm_rank")) return MPI_ERR_OTHER;
  return PMPI_Comm_rank(comm, rank);
}

int MPI_Comm_size(MPI_Comm comm, int* size) {
  if (altered("MPI_Comm_size")) return MPI_ERR_OTHER;
  return PMPI_Comm_size(comm, size);
}

int MPI_Comm_dup(MPI_Comm comm, MPI_Comm* copy) {
  if (altered("MPI_Comm_dup")) return MPI_ERR_OTHER;
  return PMPI_Comm_dup(comm, copy);
}

int MPI_Comm_split(MPI_Comm comm, int color, int key, MPI_Comm* part) {
  if (altered("MPI_Comm_split")) return MPI_ERR_OTHER;
  return PMPI_Comm_split(comm, color, key, part);
}

int MPI_Comm_set_errhandler(MPI_Comm comm, MPI_Errhandler handler) {
  if (altered("MPI_Comm_set_errhandler")) return MPI_ERR_OTHER;
  return PMPI_Comm_set_errhandler(comm, handler);
}

int MPI_Get_library_version(char* text, int* length) {
  if (altered("MPI_Get_library_version")) return MPI_ERR_OTHER;
  return PMPI_Get_library_version(text, length);
}

int MPI_Isend(const void* data, int count, MPI_Datatype type, int peer, int tag, MPI_Comm comm,
              MPI_Request* request) {
  int element = 0;
  PMPI_Type_size(type, &element);
  const int bytes = count * element;
  const bool payload = bytes >= kPayloadBytes;
  if (payload && altered("MPI_Isend")) return MPI_ERR_OTHER;
  if (payload && order().how == "flip" && is_due("MPI_Isend")) data = flipped(data, bytes);
  const bool named = order().how == "poke" && bytes == poke().bytes;
  if (named && is_due("MPI_Isend")) data = poked(data, bytes);
  return PMPI_Isend(data, count, type, peer, tag, comm, request);
}

int MPI_Irecv(void* data, int count, MPI_Datatype type, int peer, int tag, MPI_Comm comm,
              MPI_Request* request) {
  if (altered("MPI_Irecv")) return MPI_ERR_OTHER;
  return PMPI_Irecv(data, count, type, peer, tag, comm, request);
}

int MPI_Testall(int count, MPI_Request requests[], int* done, MPI_Status statuses[]) {
  if (altered("MPI_Testall")) return MPI_ERR_OTHER;
  return PMPI_Testall(count, requests, done, statuses);
}

int MPI_Ibcast(void* data, int count, MPI_Datatype type, int root, MPI_Comm comm,
               MPI_Request* request) {
  if (altered("MPI_Ibcast")) return MPI_ERR_OTHER;
  return PMPI_Ibcast(data, count, type, root, comm, request);
}

int MPI_Ibarrier(MPI_Comm comm, MPI_Request* request) {
  if (altered("MPI_Ibarrier")) return MPI_ERR_OTHER;
  return PMPI_Ibarrier(comm, request);
}

int MPI_Allreduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op,
                  MPI_Comm comm) {
  if (altered("MPI_Allreduce")) return MPI_ERR_OTHER;
  return PMPI_Allreduce(in, out, count, type, op, comm);
}

/// What a rank does to a file that others write to, too.
ssize_t pwrite(int fd, const void* data, std::size_t bytes, off_t offset) {
  altered("pwrite");
  using Write = ssize_t (*)(int, const void*, std::size_t, off_t);
  return reinterpret_cast<Write>(dlsym(RTLD_NEXT, "pwrite"))(fd, data, bytes, offset);
}

/// What ends the writing of a file: the finished one takes its name.
int rename(const char* from, const char* to) noexcept {
  altered("rename");
  using Rename = int (*)(const char*, const char*);
  return reinterpret_cast<Rename>(dlsym(RTLD_NEXT, "rename"))(from, to);
}
