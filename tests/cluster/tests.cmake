# cluster/: several nodes on this machine, in namespaces of the test (machines.sh): two with a network
# between them, and a real Slurm. Skipped where root, the kernel or the packages don't allow it.
function(gatefold_cluster_test name label)
  add_test(NAME cluster.${name} COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/cluster/${name}.sh)
  set_tests_properties(cluster.${name} PROPERTIES LABELS "${label}" SKIP_RETURN_CODE 77 TIMEOUT 300
    PROCESSORS 4 ENVIRONMENT "GATEFOLD_BUILD=${PROJECT_BINARY_DIR}")
endfunction()
gatefold_cluster_test(two_nodes multinode)
gatefold_cluster_test(cut_link multinode)
gatefold_cluster_test(slurm slurm)
