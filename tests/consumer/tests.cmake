# The installed package, as another project finds and links it.
add_test(NAME install.consumer COMMAND ${CMAKE_COMMAND}
  -DBUILD=${PROJECT_BINARY_DIR} -DSOURCE=${CMAKE_CURRENT_LIST_DIR}
  "-DOPTIONS=-G;${CMAKE_GENERATOR};-DCMAKE_BUILD_TYPE=${CMAKE_BUILD_TYPE};-DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER};-DCMAKE_CXX_FLAGS=${CMAKE_CXX_FLAGS}"
  -P ${CMAKE_CURRENT_LIST_DIR}/check.cmake)
set_tests_properties(install.consumer PROPERTIES LABELS unit TIMEOUT 300)
