# The product's kernels as nvcc has compiled them, and the product on the stand-ins.

# PTX with the flags of the product: where a product meets a sum nothing may be fused.
add_library(cuda_kernels_ptx OBJECT ${PROJECT_SOURCE_DIR}/runtime/cuda_kernels.cu)
set_target_properties(cuda_kernels_ptx PROPERTIES CUDA_PTX_COMPILATION ON CUDA_ARCHITECTURES 80)
target_include_directories(cuda_kernels_ptx PRIVATE ${PROJECT_SOURCE_DIR})
target_link_libraries(cuda_kernels_ptx PRIVATE gatefold_options)
gatefold_style_test(ptx_contraction "style;exact" $<TARGET_OBJECTS:cuda_kernels_ptx>)

if(NOT TARGET fake_cublasLt)
  message(STATUS "The product can't run on stand-ins: there is none for cuBLASLt")
  return()
endif()
gatefold_fake_kernels(product SOURCES fake_gpu/product_kernels.cpp)
gatefold_gpu_test(cuda_device SOURCES runtime/cuda_device_test.cpp KERNELS product
                  LINK gatefold_runtime LABELS exact)
foreach(np IN ITEMS 1 2 3 4)
  gatefold_fake_gpu_test(verify_cuda.np${np} NP ${np} KERNELS product TIMEOUT 300
    COMMAND $<TARGET_FILE:gatefold> verify --device cuda --comm mpi --tokens 70
            --model ${PROJECT_SOURCE_DIR}/tests/fixtures/smollm2-135m-instruct)
endforeach()
gatefold_gpu_test(cuda_far_rows SOURCES runtime/cuda_far_rows_test.cpp KERNELS product LINK gatefold_runtime)
