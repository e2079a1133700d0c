# Rules about the text of the repository, and one about what the compiler made of it.
find_program(GATEFOLD_BASH bash REQUIRED)
function(gatefold_style_test check labels)
  add_test(NAME style.${check}
           COMMAND ${GATEFOLD_BASH} ${PROJECT_SOURCE_DIR}/tests/style/${check}.sh ${ARGN}
           WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} COMMAND_EXPAND_LISTS)
  set_tests_properties(style.${check} PROPERTIES LABELS "${labels}" SKIP_RETURN_CODE 77 TIMEOUT 120)
endfunction()

gatefold_style_test(includes style)
gatefold_style_test(no_ifdef style)
gatefold_style_test(format style)
gatefold_style_test(shellcheck style)
gatefold_style_test(length style)
gatefold_style_test(names style)
gatefold_style_test(contraction "style;exact" ${CMAKE_OBJDUMP}
  $<TARGET_FILE:gatefold_runtime> $<TARGET_FILE:gatefold_parallel>
  $<TARGET_FILE:gatefold_layers> $<TARGET_FILE:gatefold_launch>)
