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

# A job in which NCCL fails ends as the program does.
add_executable(nccl_job fake_gpu/nccl/job.cpp)
target_link_libraries(nccl_job PRIVATE gatefold_parallel CUDA::cudart NCCL::nccl gatefold_options)
gatefold_fake_gpu_test(nccl_job
  COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/fake_gpu/nccl/job.sh ${GATEFOLD_MPIRUN} -- $<TARGET_FILE:nccl_job>)
