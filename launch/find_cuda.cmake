# The CUDA device: which sources and libraries the runtime has with GATEFOLD_CUDA and without it.
if(NOT GATEFOLD_CUDA)
  set(GATEFOLD_CUDA_SOURCES no_cuda.cpp)
  return()
endif()

# Shared, so that a program finds another libcudart by LD_LIBRARY_PATH; both before the language.
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80 90 100 CACHE STRING "GPUs that kernels are compiled for")
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
# CMake 3.25 doesn't know that nvcc has C++20 since 12.0.
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
# nvcc contracts by default. Constexpr functions are shared between host and device.
target_compile_options(gatefold_options INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false --expt-relaxed-constexpr -Xcompiler=-ffp-contract=off
    -Xcompiler=-Wall,-Wextra $<$<BOOL:${GATEFOLD_WERROR}>:-Werror=all-warnings>>)

set(GATEFOLD_CUDA_SOURCES cuda_device.cpp cuda_gemm.cpp cuda_versions.cpp cuda_kernels.cu
    cuda_expert_kernels.cu)
set(GATEFOLD_CUDA_LIBRARIES CUDA::cudart CUDA::cublasLt CUDA::nvtx3)
