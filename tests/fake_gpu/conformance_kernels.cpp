#include "tests/fake_gpu/conformance_kernels.cuh"

FAKE_KERNEL(conformance::scale<4, float>);
FAKE_KERNEL(conformance::scale<1, double>);
FAKE_KERNEL(conformance::number_places);
FAKE_KERNEL(conformance::block_sums);
FAKE_KERNEL(conformance::shuffles);
FAKE_KERNEL(conformance::votes);
FAKE_KERNEL(conformance::half_warps);
FAKE_KERNEL(conformance::atomics);
FAKE_KERNEL(conformance::round_values);
FAKE_KERNEL(conformance::contraction);
FAKE_KERNEL(conformance::set_all);
FAKE_KERNEL(conformance::add_one);
