# cmake -DBUILD=… -DSOURCE=… -DMPIRUN=… -DMODEL=… [-DOPTIONS=…] -P check.cmake: installs the build,
# then configures, builds and runs the consumer on three ranks against what was installed.
set(prefix ${BUILD}/consumer/prefix)
file(REMOVE_RECURSE ${BUILD}/consumer)

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output
                  ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(NOTICE "${output}")
    message(FATAL_ERROR "${command} ended with ${status}")
  endif()
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})
foreach(file bin/gatefold include/gatefold/runtime/error.h include/gatefold/layers/ffn_spec.h)
  if(NOT EXISTS ${prefix}/${file})
    message(FATAL_ERROR "cmake --install did not install ${file}")
  endif()
endforeach()

run(${CMAKE_COMMAND} -S ${SOURCE} -B ${BUILD}/consumer/build
    -DCMAKE_PREFIX_PATH=${prefix} ${OPTIONS})
run(${CMAKE_COMMAND} --build ${BUILD}/consumer/build)
run(${MPIRUN} -n 3 ${BUILD}/consumer/build/consumer ${MODEL} ${SOURCE}/experts.json)
