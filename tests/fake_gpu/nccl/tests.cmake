# The stand-in for NCCL, and what it promises.
gatefold_fake_library(nccl 2 VERSION_SCRIPT nccl/nccl.map LINK fake_cudart
  SOURCES nccl/segment.cpp nccl/transfer.cpp nccl/reduce.cpp nccl/launch.cpp nccl/group.cpp
          nccl/comm.cpp)
foreach(flavour IN ITEMS "" _asan)
  target_include_directories(fake_nccl${flavour} SYSTEM PRIVATE ${NCCL_INCLUDE_DIR})
endforeach()

gatefold_gpu_test(nccl_test SOURCES fake_gpu/nccl/nccl_test.cpp NP 1 2 3 4 LINK NCCL::nccl)
gatefold_gpu_test(nccl_strict_test SOURCES fake_gpu/nccl/nccl_strict_test.cpp NP 2 3
                  LINK NCCL::nccl)
gatefold_gpu_test(nccl_loss_test SOURCES fake_gpu/nccl/nccl_loss_test.cpp LINK NCCL::nccl)

# The communicator's own suite, and what only NCCL's does.
gatefold_gpu_test(nccl_communicator
  SOURCES parallel/communicator_test.cpp parallel/nccl_communicator_test.cpp NP 1 2 3 4
  LINK gatefold_parallel NCCL::nccl)

# A layer in a program that has a stream and a communicator of its own.
gatefold_gpu_test(callers_gpu SOURCES layers/callers_gpu_test.cpp KERNELS product NP 1 2
  LINK gatefold_layers NCCL::nccl LABELS exact)
