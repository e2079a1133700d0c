# gpu/: what runs on a machine with a GPU, by tests/gpu/check, and that command's own test.
add_executable(gpu_speed gpu/gpu_speed.cpp)
target_include_directories(gpu_speed PRIVATE ${PROJECT_SOURCE_DIR})
target_link_libraries(gpu_speed PRIVATE gatefold_layers CUDA::cudart CUDA::cublasLt gatefold_options)
add_dependencies(gpu_tests gpu_speed gatefold)

# Rehearsed on the stand-ins, so that it works when there is a GPU.
gatefold_fake_gpu_test(gpu_check KERNELS product TIMEOUT 300 LABELS program
  COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/gpu/check_test.sh ${PROJECT_BINARY_DIR})
set_tests_properties(gpu_check PROPERTIES PROCESSORS 2)
