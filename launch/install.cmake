# cmake --install: the program, the three libraries and their headers, and a package that
# find_package(Gatefold) reads.
include(CMakePackageConfigHelpers)

add_library(gatefold_package INTERFACE)
set_target_properties(gatefold_package PROPERTIES EXPORT_NAME gatefold)
target_link_libraries(gatefold_package INTERFACE gatefold_layers gatefold_parallel gatefold_runtime)
# <gatefold/layers/mlp.h> is found from here, "layers/mlp.h" within the headers one folder below.
target_include_directories(gatefold_package INTERFACE
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
add_library(Gatefold::gatefold ALIAS gatefold_package)

set(GATEFOLD_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/Gatefold)
install(TARGETS gatefold RUNTIME)
install(TARGETS gatefold_package gatefold_layers gatefold_parallel gatefold_runtime
        EXPORT GatefoldTargets ARCHIVE)
install(DIRECTORY runtime parallel layers DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/gatefold
        FILES_MATCHING PATTERN "*.h")
install(EXPORT GatefoldTargets NAMESPACE Gatefold:: DESTINATION ${GATEFOLD_PACKAGE_DIR})

configure_package_config_file(launch/GatefoldConfig.cmake.in
  ${PROJECT_BINARY_DIR}/GatefoldConfig.cmake INSTALL_DESTINATION ${GATEFOLD_PACKAGE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/GatefoldConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/GatefoldConfig.cmake
              ${PROJECT_BINARY_DIR}/GatefoldConfigVersion.cmake launch/find_onednn.cmake
              launch/find_nccl.cmake
        DESTINATION ${GATEFOLD_PACKAGE_DIR})
