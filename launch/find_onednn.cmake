# oneDNN: which sources and libraries the runtime has with GATEFOLD_ONEDNN and without it.
set(DNNL_NOT_FOUND_MESSAGE "")
if(NOT GATEFOLD_ONEDNN)
  if(NOT GATEFOLD_CUDA)
    message(FATAL_ERROR "GATEFOLD_ONEDNN=OFF without GATEFOLD_CUDA (the CPU device's plain kernels \
alone are too slow to be of use); leave it ON, or configure with GATEFOLD_CUDA=ON")
  endif()
  set(GATEFOLD_ONEDNN_SOURCES no_onednn.cpp)
  return()
endif()

# Debian's dnnl-config.cmake insists on OpenCL headers that the CPU engine doesn't need, so the
# library is looked for by name. Also part of the installed package, where what is missing is the
# caller's to report.
find_path(DNNL_INCLUDE_DIR dnnl.hpp)
find_library(DNNL_LIBRARY NAMES dnnl)
if(NOT DNNL_INCLUDE_DIR OR NOT DNNL_LIBRARY)
  set(DNNL_NOT_FOUND_MESSAGE "oneDNN not found (dnnl.hpp or libdnnl is on no search path)")
else()
  file(STRINGS ${DNNL_INCLUDE_DIR}/oneapi/dnnl/dnnl_version.h DNNL_MAJOR
       REGEX "^#define DNNL_VERSION_MAJOR ")
  if(NOT DNNL_MAJOR MATCHES " 2$")
    set(DNNL_NOT_FOUND_MESSAGE
      "unsuitable oneDNN in ${DNNL_INCLUDE_DIR} (version 3 has another interface than version 2)")
  endif()
endif()

if(DNNL_NOT_FOUND_MESSAGE)
  string(APPEND DNNL_NOT_FOUND_MESSAGE
    "; install libdnnl-dev 2.x, set DNNL_INCLUDE_DIR and DNNL_LIBRARY, or configure with GATEFOLD_CUDA=ON \
and GATEFOLD_ONEDNN=OFF")
  if(NOT CMAKE_FIND_PACKAGE_NAME)
    message(FATAL_ERROR "${DNNL_NOT_FOUND_MESSAGE}")
  endif()
elseif(NOT TARGET DNNL::dnnl)
  add_library(DNNL::dnnl UNKNOWN IMPORTED)
  set_target_properties(DNNL::dnnl PROPERTIES
    IMPORTED_LOCATION "${DNNL_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${DNNL_INCLUDE_DIR}")
endif()

set(GATEFOLD_ONEDNN_SOURCES onednn_gemm.cpp)
set(GATEFOLD_ONEDNN_LIBRARIES DNNL::dnnl)
