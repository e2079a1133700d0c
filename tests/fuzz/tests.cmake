# Fuzz targets, each built from just the sources that it needs, so that all of its code is
# instrumented. One ctest each; what it finds worth keeping stays in the build folder.
if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "GATEFOLD_FUZZ needs clang (libFuzzer is part of it), not "
          "${CMAKE_CXX_COMPILER_ID}; configure with -DCMAKE_CXX_COMPILER=clang++-14")
endif()

add_custom_target(fuzzers DEPENDS safetensors_header_fuzz)
add_executable(safetensors_header_fuzz EXCLUDE_FROM_ALL
  ${PROJECT_SOURCE_DIR}/tests/fuzz/safetensors_header_fuzz.cpp
  ${PROJECT_SOURCE_DIR}/runtime/safetensors.cpp
  ${PROJECT_SOURCE_DIR}/runtime/output_file.cpp
  ${PROJECT_SOURCE_DIR}/runtime/file_descriptor.cpp
  ${PROJECT_SOURCE_DIR}/runtime/quoted_name.cpp)
target_include_directories(safetensors_header_fuzz PRIVATE ${PROJECT_SOURCE_DIR})
target_compile_features(safetensors_header_fuzz PRIVATE cxx_std_20)
target_compile_options(safetensors_header_fuzz PRIVATE
  -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined)
target_link_options(safetensors_header_fuzz PRIVATE -fsanitize=fuzzer,address,undefined)
target_link_libraries(safetensors_header_fuzz PRIVATE
  nlohmann_json::nlohmann_json fmt::fmt gatefold_options)

set(corpus ${CMAKE_CURRENT_BINARY_DIR}/safetensors_header.corpus)
file(MAKE_DIRECTORY ${corpus})
add_test(NAME fuzz.safetensors_header
  COMMAND safetensors_header_fuzz -max_total_time=20 -seed=1 -artifact_prefix=${corpus}.
          -dict=${PROJECT_SOURCE_DIR}/tests/fuzz/safetensors_header.dict
          ${corpus} ${PROJECT_SOURCE_DIR}/tests/fuzz/safetensors_header)
set_tests_properties(fuzz.safetensors_header PROPERTIES LABELS fuzz TIMEOUT 120)
