# fake_gpu/: stand-ins for NVIDIA's libraries, so that the programs which nvcc built run without a
# GPU (see README.md). Each is built twice: plain, and with ASan and UBSan (`<name>_asan`).
set(fake_gpu_output ${PROJECT_BINARY_DIR}/tests/fake_gpu)
set(fake_gpu_sanitize -fsanitize=address,undefined -fno-sanitize-recover=all
    -fno-omit-frame-pointer -O1 -g)

add_custom_target(fake_gpu_all)  # the stand-ins
add_custom_target(gpu_tests)     # what runs on a GPU
add_custom_target(fake_gpu_tests DEPENDS fake_gpu_all gpu_tests)  # what ctest -L fake_gpu needs

# One shared library in both flavours; LINK names other fake_ targets or plain libraries.
function(gatefold_fake_target target directory)
  cmake_parse_arguments(arg "" "" "SOURCES;LINK;OPTIONS;LINK_OPTIONS;PROPERTIES" ${ARGN})
  foreach(flavour IN ITEMS "" _asan)
    set(links ${arg_LINK})
    list(TRANSFORM links REPLACE "^(fake_.*)$" "\\1${flavour}")
    add_library(${target}${flavour} SHARED ${arg_SOURCES})
    set_target_properties(${target}${flavour} PROPERTIES ${arg_PROPERTIES}
      LIBRARY_OUTPUT_DIRECTORY ${fake_gpu_output}/${directory}${flavour})
    target_include_directories(${target}${flavour} PRIVATE ${PROJECT_SOURCE_DIR})
    target_include_directories(${target}${flavour} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
    target_compile_options(${target}${flavour} PRIVATE ${arg_OPTIONS})
    target_link_options(${target}${flavour} PRIVATE ${arg_LINK_OPTIONS})
    target_link_libraries(${target}${flavour} PRIVATE ${links} Threads::Threads ${CMAKE_DL_LIBS})
    add_dependencies(fake_gpu_all ${target}${flavour})
    if(flavour)
      target_compile_options(${target}${flavour} PRIVATE ${fake_gpu_sanitize})
      target_link_options(${target}${flavour} PRIVATE -fsanitize=address,undefined)
    endif()
  endforeach()
endfunction()

# gatefold_fake_library(cudart 13 SOURCES a.cpp … VERSION_SCRIPT cudart.map [LINK fake_cudart …])
# lib<name>.so.<version> in tests/fake_gpu/lib of the build, as target fake_<name>.
function(gatefold_fake_library name version)
  cmake_parse_arguments(arg "" "VERSION_SCRIPT" "SOURCES;LINK" ${ARGN})
  list(TRANSFORM arg_SOURCES PREPEND ${PROJECT_SOURCE_DIR}/tests/fake_gpu/)
  set(script ${PROJECT_SOURCE_DIR}/tests/fake_gpu/${arg_VERSION_SCRIPT})
  gatefold_fake_target(fake_${name} lib SOURCES ${arg_SOURCES}
    LINK ${arg_LINK} gatefold_options
    LINK_OPTIONS -Wl,--version-script=${script}
    PROPERTIES OUTPUT_NAME ${name} SOVERSION ${version} LINK_DEPENDS ${script})
endfunction()

# gatefold_fake_kernels(name SOURCES a.cpp …): kernels as g++ compiles them. A source includes the
# .cuh and registers each instance with FAKE_KERNEL. Kernels read memory by vectors of other types.
function(gatefold_fake_kernels name)
  cmake_parse_arguments(arg "" "" "SOURCES" ${ARGN})
  gatefold_fake_target(fake_kernels_${name} kernels SOURCES ${arg_SOURCES} LINK fake_cudart
    OPTIONS -ffp-contract=off -fno-strict-aliasing -Wall -Wextra $<$<BOOL:${GATEFOLD_WERROR}>:-Werror> -fno-gnu-unique
            -include ${PROJECT_SOURCE_DIR}/tests/fake_gpu/device_shim.h
    LINK_OPTIONS -Wl,-Bsymbolic)
endfunction()

# gatefold_fake_gpu_test(test COMMAND … [KERNELS product …] [FLAVOUR _asan] [NP n] [LABELS …]
#                        [ENVIRONMENT …] [TIMEOUT s])
# Runs a command, such as the product, on the stand-ins. What it names as $<TARGET_FILE:…> becomes
# part of fake_gpu_tests.
execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libasan.so
                OUTPUT_VARIABLE fake_gpu_libasan OUTPUT_STRIP_TRAILING_WHITESPACE)
function(gatefold_fake_gpu_test test)
  cmake_parse_arguments(arg "" "FLAVOUR;NP;TIMEOUT" "COMMAND;KERNELS;LABELS;ENVIRONMENT" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  foreach(word IN LISTS arg_COMMAND)
    if(word MATCHES "^\\$<TARGET_FILE:(.*)>$")
      add_dependencies(fake_gpu_tests ${CMAKE_MATCH_1})
    endif()
  endforeach()
  set(kernels "")
  foreach(library IN LISTS arg_KERNELS)
    list(APPEND kernels $<TARGET_FILE:fake_kernels_${library}${arg_FLAVOUR}>)
  endforeach()
  list(JOIN kernels ":" kernels)
  if(arg_FLAVOUR)
    # Only the program itself: mpirun has leaks of its own.
    list(PREPEND arg_COMMAND env LD_PRELOAD=${fake_gpu_libasan})
  endif()
  if(arg_NP)
    list(PREPEND arg_COMMAND ${GATEFOLD_MPIRUN} -n ${arg_NP})
    list(APPEND arg_LABELS np${arg_NP})
  endif()
  add_test(NAME ${test} COMMAND ${arg_COMMAND})
  # GoogleTest ends with 0 where a filter fits nothing, and where it shows its help instead.
  set_tests_properties(${test} PROPERTIES LABELS "fake_gpu;${arg_LABELS}" TIMEOUT ${arg_TIMEOUT}
    FAIL_REGULAR_EXPRESSION "Running 0 tests|This program contains tests written using Google Test"
    ENVIRONMENT "${GATEFOLD_MPI_ENVIRONMENT};GATEFOLD_FAKE_GPU=1;GATEFOLD_FAKE_GPU_KERNELS=${kernels};ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0;UBSAN_OPTIONS=print_stacktrace=1;${arg_ENVIRONMENT}"
    ENVIRONMENT_MODIFICATION "LD_LIBRARY_PATH=path_list_prepend:${fake_gpu_output}/lib${arg_FLAVOUR}")
  if(arg_NP)
    set_tests_properties(${test} PROPERTIES PROCESSORS ${arg_NP})
  endif()
endfunction()

# gatefold_on_gpu(test program [LAUNCH mpirun …] [LABELS …] [ENVIRONMENT …] TIMEOUT s)
# `test.gpu` runs a program on a GPU, or skips with the reason. A kernel that is loaded at its first
# launch may wait for all work on the GPU: a deadlock where a test holds a stream back.
function(gatefold_on_gpu test program)
  cmake_parse_arguments(arg "" "TIMEOUT" "LAUNCH;LABELS;ENVIRONMENT" ${ARGN})
  add_dependencies(gpu_tests ${program} gpu_probe)
  add_test(NAME ${test}.gpu COMMAND ${PROJECT_SOURCE_DIR}/tests/fake_gpu/on_gpu.sh
           $<TARGET_FILE:gpu_probe> ${arg_LAUNCH} $<TARGET_FILE:${program}>)
  set_tests_properties(${test}.gpu PROPERTIES LABELS "gpu;${arg_LABELS}" TIMEOUT ${arg_TIMEOUT}
    SKIP_RETURN_CODE 77 RUN_SERIAL ON
    ENVIRONMENT "${GATEFOLD_MPI_ENVIRONMENT};CUDA_MODULE_LOADING=EAGER;${arg_ENVIRONMENT}")
endfunction()

# gatefold_gpu_test(name SOURCES a.cu b.cpp … [KERNELS product …] [NP 1 2 …] [LINK …] [LABELS …]
#                   [ENVIRONMENT …] [TIMEOUT s])
# A GoogleTest program linked with NVIDIA's libraries. `name[.npN]` runs it on the stand-ins,
# `name[.npN].asan` on their sanitized build, `name[.npN].gpu` on a GPU, or skips with the reason.
function(gatefold_gpu_test name)
  cmake_parse_arguments(arg "" "TIMEOUT" "SOURCES;KERNELS;NP;LINK;LABELS;ENVIRONMENT" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${arg_LINK} CUDA::cudart GTest::gmock
    gatefold_options
    $<IF:$<BOOL:${arg_NP}>,gatefold_mpi_main,GTest::gmock_main>)
  set(counts ${arg_NP})
  if(NOT counts)
    set(counts alone)
  endif()
  foreach(np IN LISTS counts)
    set(test ${name})
    set(ranks "")
    set(launch "")
    if(arg_NP)
      set(test ${name}.np${np})
      set(ranks NP ${np})
      set(launch ${GATEFOLD_MPIRUN} -n ${np})
    endif()
    foreach(flavour IN ITEMS "" _asan)
      string(REPLACE _ . suffix "${flavour}")
      gatefold_fake_gpu_test(${test}${suffix} COMMAND $<TARGET_FILE:${name}> ${ranks}
        FLAVOUR ${flavour} KERNELS ${arg_KERNELS} TIMEOUT ${arg_TIMEOUT}
        LABELS fake_gpu${flavour} ${arg_LABELS} ENVIRONMENT ${arg_ENVIRONMENT})
    endforeach()
    gatefold_on_gpu(${test} ${name} LAUNCH ${launch} LABELS ${arg_LABELS} TIMEOUT ${arg_TIMEOUT})
  endforeach()
endfunction()

add_executable(gpu_probe fake_gpu/gpu_probe.cpp)
target_link_libraries(gpu_probe PRIVATE CUDA::cudart gatefold_options)

gatefold_fake_library(cudart 13 VERSION_SCRIPT cudart.map
  SOURCES settings.cpp fiber_stack.cpp fibers.cpp cudart_device.cpp cudart_stream.cpp
          cudart_memory.cpp cudart_launch.cpp)

# What the stand-ins promise, checked on them and, where there is one, on a GPU.
gatefold_fake_kernels(conformance SOURCES fake_gpu/conformance_kernels.cpp)
gatefold_gpu_test(kernel_conformance_test SOURCES fake_gpu/kernel_conformance_test.cu
                  KERNELS conformance)
gatefold_gpu_test(runtime_conformance_test SOURCES fake_gpu/runtime_conformance_test.cu
                  KERNELS conformance)

# What only a stand-in finds.
gatefold_fake_kernels(misuse SOURCES fake_gpu/misuse_kernels.cpp)
add_executable(misuse fake_gpu/misuse.cu)
target_include_directories(misuse PRIVATE ${PROJECT_SOURCE_DIR})
target_link_libraries(misuse PRIVATE CUDA::cudart gatefold_options)
foreach(flavour IN ITEMS "" _asan)
  string(REPLACE _ . suffix "${flavour}")
  gatefold_fake_gpu_test(fake_gpu.misuse${suffix} FLAVOUR ${flavour} KERNELS misuse
    COMMAND ${PROJECT_SOURCE_DIR}/tests/fake_gpu/misuse.sh $<TARGET_FILE:misuse>
    LABELS fake_gpu${flavour})
endforeach()

if(GATEFOLD_NCCL)
  include(fake_gpu/nccl/tests.cmake)
endif()

gatefold_fake_library(cublasLt 13 VERSION_SCRIPT cublaslt.map LINK fake_cudart
  SOURCES cublaslt_algos.cpp cublaslt_gemm.cpp cublaslt_info.cpp cublaslt_matmul.cpp
          cublaslt_objects.cpp cublaslt_problem.cpp)
# Sums of operands that were looked at before: a sanitized test would wait for little else.
set_source_files_properties(${PROJECT_SOURCE_DIR}/tests/fake_gpu/cublaslt_gemm.cpp
  PROPERTIES COMPILE_OPTIONS "-fno-sanitize=all;-O3")
gatefold_fake_library(cublas 13 VERSION_SCRIPT cublas.map LINK fake_cublasLt fake_cudart
  SOURCES cublas.cpp)
gatefold_gpu_test(cublaslt_matmul SOURCES fake_gpu/cublaslt_matmul_test.cpp LINK CUDA::cublasLt)
gatefold_gpu_test(cublaslt_algos SOURCES fake_gpu/cublaslt_algos_test.cpp LINK CUDA::cublasLt)
gatefold_gpu_test(cublas SOURCES fake_gpu/cublas_test.cpp LINK CUDA::cublas)
gatefold_gpu_test(cublaslt_descriptors SOURCES fake_gpu/cublaslt_descriptors_test.cpp
  LINK CUDA::cublasLt)
# Descriptors need no device: the real library shows on any machine that the test is right.
add_test(NAME cublaslt_descriptors.real COMMAND cublaslt_descriptors)
set_tests_properties(cublaslt_descriptors.real PROPERTIES LABELS fake_gpu TIMEOUT 60)
