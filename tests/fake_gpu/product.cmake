# The product's kernels as nvcc has compiled them, and the product on the stand-ins.

# PTX with the flags of the product: where a product meets a sum nothing may be fused.
add_library(cuda_kernels_ptx OBJECT ${PROJECT_SOURCE_DIR}/runtime/cuda_kernels.cu
            ${PROJECT_SOURCE_DIR}/runtime/cuda_expert_kernels.cu)
set_target_properties(cuda_kernels_ptx PROPERTIES CUDA_PTX_COMPILATION ON CUDA_ARCHITECTURES 80)
target_include_directories(cuda_kernels_ptx PRIVATE ${PROJECT_SOURCE_DIR})
target_link_libraries(cuda_kernels_ptx PRIVATE gatefold_options)
gatefold_style_test(ptx_contraction "style;exact;cuda" $<TARGET_OBJECTS:cuda_kernels_ptx>)

gatefold_fake_kernels(product SOURCES fake_gpu/product_kernels.cpp)
gatefold_gpu_test(cuda_device SOURCES runtime/cuda_device_test.cpp KERNELS product
                  LINK gatefold_runtime LABELS exact)
# With label cuda, what any build with CUDA is asked: does the program still run?
add_custom_target(cuda_tests DEPENDS
  gatefold gpu_probe cuda_kernels_ptx fake_cudart fake_cublasLt fake_kernels_product)
add_dependencies(fake_gpu_tests cuda_tests)
add_executable(cuda_setup runtime/cuda_setup_test.cpp)
target_link_libraries(cuda_setup PRIVATE gatefold_runtime GTest::gmock_main gatefold_options)
# cuda_setup.<test> in the environment that it is about.
foreach(item IN ITEMS
    NoDevice:DEVICES=0 OldGpu:CAPABILITY=75 OldDriver:DRIVER=12040 NoDriver:DRIVER=0 NoCublas:FAIL=cublas_create:1
    NoMemoryForTheWorkspace:MEMORY=16777216 NoMemoryForAStep:MEMORY=83886080
    NoPinnedMemory:FAIL=host_malloc:1 NoAlgorithm:GEMM_UNSUPPORTED=192x33x64,192x256x64
    LostDevice:FAIL=launch:1)
  string(REGEX MATCH "^([^:]*):(.*)$" matched ${item})
  foreach(flavour IN ITEMS "" _asan)
    string(REPLACE _ . suffix "${flavour}")
    gatefold_fake_gpu_test(cuda_setup.${CMAKE_MATCH_1}${suffix} FLAVOUR ${flavour} KERNELS product
      COMMAND $<TARGET_FILE:cuda_setup> --gtest_filter=CudaSetUp.${CMAKE_MATCH_1}
      LABELS fake_gpu${flavour} ENVIRONMENT GATEFOLD_FAKE_GPU_${CMAKE_MATCH_2} TIMEOUT 60)
  endforeach()
endforeach()
gatefold_gpu_test(cuda_kernel_choice SOURCES layers/cuda_kernel_choice_test.cpp NP 2 3
                  KERNELS product LINK gatefold_layers)
# Ranks whose libraries would choose other algorithms.
foreach(np IN ITEMS 2 3 4)
  gatefold_fake_gpu_test(verify_cuda_rankings.np${np} NP ${np} KERNELS product TIMEOUT 300
    COMMAND $<TARGET_FILE:gatefold> verify --device cuda --comm mpi --tokens 70 --layers 0
            --model ${PROJECT_SOURCE_DIR}/tests/fixtures/smollm2-135m-instruct
    ENVIRONMENT GATEFOLD_FAKE_GPU_GEMM_RANKING=0,1:1,2:2)
endforeach()
foreach(np IN ITEMS 1 2 3 4)
  gatefold_fake_gpu_test(verify_cuda.np${np} NP ${np} KERNELS product TIMEOUT 300
    COMMAND $<TARGET_FILE:gatefold> verify --device cuda --comm mpi --tokens 70
            --model ${PROJECT_SOURCE_DIR}/tests/fixtures/smollm2-135m-instruct)
endforeach()
set_property(TEST verify_cuda.np2 APPEND PROPERTY LABELS cuda)
# Mixtures of experts: those with groups, shared experts and biases, and where host memory is closed.
set(comms mpi)
if(GATEFOLD_NCCL)
  list(APPEND comms nccl)
endif()
foreach(item IN ITEMS deepseek_v3:1 deepseek_v3:2 deepseek_v3:3 deepseek_v3:4 gpt_oss:3 llama4:2)
  string(REGEX MATCH "^(.*):(.*)$" matched ${item})
  set(np ${CMAKE_MATCH_2})
  foreach(comm IN LISTS comms)
    gatefold_fake_gpu_test(verify_cuda_${CMAKE_MATCH_1}.${comm}.np${np} NP ${np} KERNELS product TIMEOUT 120
      COMMAND $<TARGET_FILE:gatefold> verify --device cuda --comm ${comm} --tokens 70 --expert-blocks 4
              --model ${PROJECT_SOURCE_DIR}/tests/golden/${CMAKE_MATCH_1}/bf16
      ENVIRONMENT GATEFOLD_FAKE_GPU_CLOSED=$<EQUAL:${np},3>)
  endforeach()
endforeach()
# As on a GPU the host can't read what is there.
gatefold_fake_gpu_test(verify_cuda_closed.np3 NP 3 KERNELS product TIMEOUT 300
  COMMAND $<TARGET_FILE:gatefold> verify --device cuda --comm mpi --tokens 70 --layers 0
          --model ${PROJECT_SOURCE_DIR}/tests/fixtures/smollm2-135m-instruct
  ENVIRONMENT GATEFOLD_FAKE_GPU_CLOSED=1)
gatefold_fake_gpu_test(cuda_device_closed KERNELS product COMMAND $<TARGET_FILE:cuda_device>
  ENVIRONMENT GATEFOLD_FAKE_GPU_CLOSED=1)
if(GATEFOLD_NCCL)
  gatefold_fake_gpu_test(verify_cuda_closed.nccl.np3 NP 3 KERNELS product TIMEOUT 300
    COMMAND $<TARGET_FILE:gatefold> verify --device cuda --comm nccl --tokens 70 --layers 0
            --model ${PROJECT_SOURCE_DIR}/tests/fixtures/smollm2-135m-instruct
    ENVIRONMENT GATEFOLD_FAKE_GPU_CLOSED=1)
endif()
gatefold_fake_gpu_test(version_cuda LABELS cuda COMMAND $<TARGET_FILE:gatefold> --version)
set_tests_properties(version_cuda PROPERTIES PASS_REGULAR_EXPRESSION
  "CUDA    toolkit 1[0-9.]*, runtime 1[0-9.]*, cuBLASLt 1[0-9.]*, compute [0-9].*found   8 x FakeGPU, 64 GiB, compute 9.0; driver for CUDA 1")
gatefold_fake_gpu_test(installed_cuda KERNELS product LABELS cuda
  COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/fake_gpu/installed.sh ${PROJECT_BINARY_DIR}
          ${PROJECT_SOURCE_DIR}/tests/golden/llama/bf16 ${GATEFOLD_MPIRUN})
set_tests_properties(installed_cuda PROPERTIES PROCESSORS 3)
# The GPU of a rank is its number on the host, and where there is but one, that one.
foreach(item IN ITEMS several:8:1 one:1:0)
  string(REGEX MATCH "^(.*):(.*):(.*)$" matched ${item})
  gatefold_fake_gpu_test(places_cuda_${CMAKE_MATCH_1}.np2 NP 2
    ENVIRONMENT GATEFOLD_FAKE_GPU_DEVICES=${CMAKE_MATCH_2}
    COMMAND $<TARGET_FILE:gatefold> verify --device cuda --dry-run --verbose
            --config ${PROJECT_SOURCE_DIR}/configs/gpt2.json)
  set_tests_properties(places_cuda_${CMAKE_MATCH_1}.np2 PROPERTIES PASS_REGULAR_EXPRESSION
    "rank 0 [^\n]*, cuda 0, FakeGPU.*rank 1 [^\n]*, cuda ${CMAKE_MATCH_3}, FakeGPU")
endforeach()
# What a machine is measured by, with GPUs' copies and messages.
list(GET comms -1 machine_comm)
gatefold_fake_gpu_test(machine_cuda.${machine_comm}.np2 NP 2 KERNELS product TIMEOUT 300
  COMMAND $<TARGET_FILE:gatefold> bench --machine --device cuda --comm ${machine_comm} --iterations 1 --warmup 0)
set_tests_properties(machine_cuda.${machine_comm}.np2 PROPERTIES PASS_REGULAR_EXPRESSION
  "FakeGPU.*gemm .*read .*host to device .*message .*all-reduce .*all-to-all .*busbw")
# The CPU device beside it, which may be without oneDNN.
gatefold_fake_gpu_test(verify_cpu.np2 NP 2 LABELS cuda
  COMMAND $<TARGET_FILE:gatefold> verify --device cpu
          --model ${PROJECT_SOURCE_DIR}/tests/fixtures/smollm2-135m-instruct)
gatefold_gpu_test(cuda_far_rows SOURCES runtime/cuda_far_rows_test.cpp KERNELS product LINK gatefold_runtime)
gatefold_gpu_test(cuda_ranges SOURCES layers/cuda_ranges_test.cpp KERNELS product NP 1 2
                  LINK gatefold_layers CUDA::nvtx3)

# gatefold_cuda_test(name [NP 1 2 …] [COMM nccl] [FILTER tests] [LABELS …] [TIMEOUT s])
# The program of a gatefold_test once more, with the CUDA device, whose tensors go through host
# memory or by COMM: `name.cuda[.npN]`, or `name.nccl.npN`, on the stand-ins. The first also on a GPU,
# which ranks may share, as `name.cuda[.npN].gpu`, or skipped with the reason. FILTER is GoogleTest's.
function(gatefold_cuda_test name)
  cmake_parse_arguments(arg "" "COMM;FILTER;TIMEOUT" "NP;LABELS" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  set(kind cuda)
  set(environment GATEFOLD_TEST_DEVICE=cuda)
  if(arg_COMM)
    set(kind ${arg_COMM})
    list(APPEND environment GATEFOLD_TEST_COMM=${arg_COMM})
  endif()
  if(arg_FILTER)
    list(APPEND environment GTEST_FILTER=${arg_FILTER})
  endif()
  set(counts ${arg_NP})
  if(NOT counts)
    set(counts alone)
  endif()
  foreach(np IN LISTS counts)
    set(test ${name}.${kind})
    set(ranks "")
    set(launch "")
    if(arg_NP)
      set(test ${test}.np${np})
      set(ranks NP ${np})
      set(launch ${GATEFOLD_MPIRUN} -n ${np})
    endif()
    gatefold_fake_gpu_test(${test} COMMAND $<TARGET_FILE:${name}> ${ranks} KERNELS product
      LABELS ${arg_LABELS} ENVIRONMENT ${environment} TIMEOUT ${arg_TIMEOUT})
    if(arg_COMM)
      continue()
    endif()
    gatefold_on_gpu(${test} ${name} LAUNCH ${launch} LABELS ${arg_LABELS} ENVIRONMENT ${environment}
                    TIMEOUT ${arg_TIMEOUT})
  endforeach()
endfunction()
gatefold_cuda_test(machine)
gatefold_cuda_test(exact NP 1 2 3 4 LABELS exact)
gatefold_cuda_test(golden NP 1 3)
gatefold_cuda_test(moe_golden NP 2)
gatefold_cuda_test(kernel_choice NP 2)
gatefold_cuda_test(linear NP 2 LABELS exact)
gatefold_cuda_test(mlp NP 2 4 LABELS exact)
gatefold_cuda_test(tree_sum NP 1 2 3 4 LABELS exact)
gatefold_cuda_test(moe NP 1 2 3 LABELS exact)
gatefold_cuda_test(balance FILTER RouterBias* NP 1 LABELS exact)
# The number of threads is a CPU's. Sanitized too, as the kernels of mixtures of experts have no other test.
foreach(test IN ITEMS expert_device combine_rows)
  gatefold_cuda_test(${test} FILTER Threads/*/0 LABELS exact)
  gatefold_fake_gpu_test(${test}.cuda.asan FLAVOUR _asan KERNELS product LABELS fake_gpu_asan
    COMMAND $<TARGET_FILE:${test}>
    ENVIRONMENT GATEFOLD_TEST_DEVICE=cuda GTEST_FILTER=Threads/*/0)
endforeach()
gatefold_cuda_test(many_rows)
gatefold_cuda_test(communicator NP 1 2 3 4 FILTER Backends/*)
# Of the program's own tests those that compute.
gatefold_cuda_test(program LABELS program
  FILTER *InspectCountsHowFar*:*RunWrites*:*Ablation*:*ANanToken*:*MadeModelGives*)
gatefold_cuda_test(bench_program LABELS program FILTER *Compares*:*TableCsv*:*ASweep*)
gatefold_cuda_test(moe_program LABELS program
  FILTER *EightExperts*:*OneOrTwoOfThem*:*HowTheTokensSpread*:*RoutesAsRun*:*GatesAndRouters*)

if(GATEFOLD_NCCL)
  gatefold_cuda_test(exact COMM nccl NP 4 LABELS exact)
  gatefold_cuda_test(linear COMM nccl NP 2 LABELS exact)
  gatefold_cuda_test(mlp COMM nccl NP 3 LABELS exact)
  gatefold_cuda_test(tree_sum COMM nccl NP 2 3 LABELS exact)
  gatefold_cuda_test(moe COMM nccl NP 4 LABELS exact)
endif()

# Jobs with planted faults, by the scripts of tests/faults: most of them, since each takes seconds.
add_dependencies(fake_gpu_tests gatefold_with_faults pmpi_alter)  # which the scripts start
function(gatefold_cuda_fault_test name)
  gatefold_fake_gpu_test(faults.${name}.cuda KERNELS product TIMEOUT 300 LABELS faults
    COMMAND ${PROJECT_SOURCE_DIR}/tests/faults/${name}.sh
    ENVIRONMENT GATEFOLD_TEST_DEVICE=cuda GATEFOLD_FAULT_RANKS=2
                "GATEFOLD_FAULT_SKIP=benchmark|bias|NaN|zero|gate is taken"
                GATEFOLD_BUILD=${PROJECT_BINARY_DIR} "GATEFOLD_MPIRUN=${mpirun_line}")
  set_tests_properties(faults.${name}.cuda PROPERTIES PROCESSORS 4)
endfunction()
gatefold_cuda_fault_test(wrong_results)
gatefold_cuda_fault_test(unstable_gemm)
gatefold_cuda_fault_test(moe_results)

# What GPUs and NCCL can do to a job (with the other tests of the driver, in faults/).
gatefold_fake_gpu_test(faults.cuda KERNELS product LABELS faults TIMEOUT 300
  COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/faults/cuda_faults.sh ${comms}
  ENVIRONMENT "GATEFOLD_MPIRUN=${mpirun_line}" "GATEFOLD_BUILD=${PROJECT_BINARY_DIR}")
gatefold_fake_gpu_test(faults.moe.cuda KERNELS product LABELS faults TIMEOUT 300
  COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/faults/cuda_faults.sh experts ${comms}
  ENVIRONMENT "GATEFOLD_MPIRUN=${mpirun_line}" "GATEFOLD_BUILD=${PROJECT_BINARY_DIR}")
set_tests_properties(faults.cuda faults.moe.cuda PROPERTIES PROCESSORS 4)
