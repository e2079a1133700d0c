// misuse CASE: does one thing that a program must not do, then prints what CUDA calls answer. Only
// for the stand-in: on a GPU some of these are silent.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <thread>
#include <vector>

#define DYNAMIC_SHARED(T, name)                            \
  extern __shared__ __align__(16) unsigned char name##_[]; \
  T* name = reinterpret_cast<T*>(name##_)

#include "tests/fake_gpu/misuse_kernels.cuh"

namespace {

int* device_ints(std::size_t count) {
  int* data = nullptr;
  const cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&data), count * sizeof(int));
  if (error != cudaSuccess) {
    std::printf("cudaMalloc: %s\n", cudaGetErrorName(error));
    std::exit(0);
  }
  return data;
}

void report(cudaError_t error) { std::printf("%s\n", cudaGetErrorName(error)); }

/// What the launch says, then what a wait says, then that it stays so.
void report_launch() {
  report(cudaGetLastError());
  report(cudaDeviceSynchronize());
  report(cudaDeviceSynchronize());
}

/// Whether a thread met its neighbour's value unwritten, which an order of the threads can hide.
void show_poison(int* out, int step) {
  misuse::no_barrier<<<1, 64>>>(out, step);
  std::vector<int> values(64);
  report(cudaMemcpy(values.data(), out, 256, cudaMemcpyDeviceToHost));
  const bool seen = std::find(values.begin(), values.end(), -1) != values.end();
  std::printf("poison: %s\n", seen ? "seen" : "not seen");
}

struct Case {
  const char* name;
  void (*run)(int* out);
};

const Case kCases[] = {
    {"nothing", [](int* out) { misuse::fill<<<1, 64>>>(out, 64); }},
    {"one_branch_waits", [](int* out) { misuse::one_branch_waits<<<1, 64>>>(out); }},
    {"some_leave_early", [](int* out) { misuse::some_leave_early<<<1, 64>>>(out); }},
    {"lane_outside_its_mask", [](int* out) { misuse::lane_outside_its_mask<<<1, 64>>>(out); }},
    {"trap", [](int* out) { misuse::trap_at<<<1, 64>>>(out, 5); }},
    {"write_past_shared", [](int* out) { misuse::write_past_shared<<<1, 1, 40>>>(out, 11); }},
    {"one_too_many", [](int* out) { misuse::fill<<<1, 32>>>(out, 65); }},
    {"misaligned",
     [](int* out) {
       auto* floats = reinterpret_cast<float*>(out);
       misuse::copy_four<<<1, 1>>>(floats + 1, floats + 8);
     }},
    {"after_free",
     [](int* out) {
       report(cudaFree(out));
       misuse::fill<<<1, 32>>>(out, 1);
     }},
    {"unchecked_launch",
     [](int* out) {
       misuse::fill<<<1, 64>>>(out, 64);
       misuse::fill<<<1, 64>>>(out, 64);
     }},
    {"no_barrier", [](int* out) { show_poison(out, 1); }},
    {"no_barrier_below", [](int* out) { show_poison(out, -1); }},
    {"missing_wait",
     [](int* out) {
       cudaStream_t first = nullptr;
       cudaStream_t second = nullptr;
       report(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
       report(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
       misuse::fill<<<1, 64, 0, first>>>(out, 64);
       report(cudaGetLastError());
       std::this_thread::sleep_for(std::chrono::milliseconds(50));
       int value = 0;
       report(cudaMemcpyAsync(&value, out, 4, cudaMemcpyDeviceToHost, second));
       std::printf("value: %d\n", value);
     }},
    {"outside",
     [](int* out) {
       std::vector<int> values(65);
       report(cudaMemcpy(out, values.data(), 65 * 4, cudaMemcpyHostToDevice));
       report(cudaMemcpy(values.data(), out + 1, 64 * 4, cudaMemcpyDeviceToHost));
       report(cudaMemset(out + 60, 0, 17));
     }},
    {"wrong_way",
     [](int* out) {
       int value = 0;
       report(cudaMemcpy(&value, out, 4, cudaMemcpyHostToDevice));
       report(cudaMemcpy(&value, &value, 4, cudaMemcpyDeviceToHost));
     }},
    {"twice_freed",
     [](int* out) {
       report(cudaFree(out));
       report(cudaFree(out));
     }},
    {"call_in_host_function",
     [](int*) {
       report(cudaLaunchHostFunc(
           nullptr, [](void*) { report(cudaDeviceSynchronize()); }, nullptr));
       report(cudaStreamSynchronize(nullptr));
     }},
    {"host_reads",
     [](int* out) {
       report(cudaMemset(out, 0, 4));
       report(cudaDeviceSynchronize());
       std::printf("value: %d\n", *static_cast<volatile int*>(out));
     }},
    {"copy",
     [](int* out) {
       int value = 0;
       report(cudaMemcpy(out, &value, 4, cudaMemcpyHostToDevice));
     }},
};

}  // namespace

int main(int argc, char** argv) {
  for (const Case& one : kCases) {
    if (argc != 2 || std::string_view(argv[1]) != one.name) continue;
    one.run(device_ints(64));
    report_launch();
    return 0;
  }
  return 64;
}
