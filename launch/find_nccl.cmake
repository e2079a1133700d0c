# The NCCL communicator: which sources and libraries parallel/ has with GATEFOLD_NCCL. CMake's
# CUDAToolkit doesn't know NCCL, which lies beside CUDA or where the system has it. Also part of the
# installed package, where what is missing is the caller's to report.
set(NCCL_NOT_FOUND_MESSAGE "")
if(NOT GATEFOLD_NCCL)
  set(GATEFOLD_NCCL_SOURCES no_nccl.cpp)
  return()
endif()

find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
find_library(NCCL_LIBRARY NAMES nccl HINTS ${CUDAToolkit_LIBRARY_DIR} ${CUDAToolkit_LIBRARY_ROOT})
if(NOT GATEFOLD_CUDA)
  set(NCCL_NOT_FOUND_MESSAGE "GATEFOLD_NCCL without GATEFOLD_CUDA (NCCL moves the memory of GPUs)")
elseif(NOT NCCL_INCLUDE_DIR OR NOT NCCL_LIBRARY)
  set(NCCL_NOT_FOUND_MESSAGE "NCCL not found (nccl.h or libnccl is on no search path); install \
libnccl-dev, set NCCL_INCLUDE_DIR and NCCL_LIBRARY")
endif()

if(NCCL_NOT_FOUND_MESSAGE)
  string(APPEND NCCL_NOT_FOUND_MESSAGE ", or configure with GATEFOLD_NCCL=OFF")
  if(NOT CMAKE_FIND_PACKAGE_NAME)
    message(FATAL_ERROR "${NCCL_NOT_FOUND_MESSAGE}")
  endif()
elseif(NOT TARGET NCCL::nccl)
  add_library(NCCL::nccl UNKNOWN IMPORTED)
  set_target_properties(NCCL::nccl PROPERTIES
    IMPORTED_LOCATION "${NCCL_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${NCCL_INCLUDE_DIR}")
endif()

set(GATEFOLD_NCCL_SOURCES nccl_communicator.cpp)
set(GATEFOLD_NCCL_LIBRARIES NCCL::nccl CUDA::cudart)
