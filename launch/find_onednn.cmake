# Debian's dnnl-config.cmake insists on OpenCL headers that the CPU engine doesn't need, so the
# library is looked for by name. Also part of the installed package, where what is missing is the
# caller's to report.
find_path(DNNL_INCLUDE_DIR dnnl.hpp)
find_library(DNNL_LIBRARY NAMES dnnl)
set(DNNL_NOT_FOUND_MESSAGE "")
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
    "; install libdnnl-dev 2.x, or set DNNL_INCLUDE_DIR and DNNL_LIBRARY")
  if(NOT CMAKE_FIND_PACKAGE_NAME)
    message(FATAL_ERROR "${DNNL_NOT_FOUND_MESSAGE}")
  endif()
elseif(NOT TARGET DNNL::dnnl)
  add_library(DNNL::dnnl UNKNOWN IMPORTED)
  set_target_properties(DNNL::dnnl PROPERTIES
    IMPORTED_LOCATION "${DNNL_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${DNNL_INCLUDE_DIR}")
endif()
