#include "tests/fake_gpu/misuse_kernels.cuh"

FAKE_KERNEL(misuse::one_branch_waits);
FAKE_KERNEL(misuse::some_leave_early);
FAKE_KERNEL(misuse::lane_outside_its_mask);
FAKE_KERNEL(misuse::no_barrier);
FAKE_KERNEL(misuse::trap_at);
FAKE_KERNEL(misuse::write_past_shared);
FAKE_KERNEL(misuse::fill);
FAKE_KERNEL(misuse::copy_four);
