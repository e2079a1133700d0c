#pragma once

/// Compiles a function for each vector width and lets the loader choose. The bits don't differ: the
/// columns of a kernel are independent, and no target contracts. For kernels that no test has to
/// run at a narrower width than the machine's; others take a VectorIsa. An attribute that comes
/// before every declaration can only be shared as a macro.
#define GATEFOLD_CLONES [[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]

namespace gatefold {

/// Instruction sets that kernels are compiled for one by one. Results don't differ by a bit.
enum class VectorIsa { kSse2, kAvx2, kAvx512 };

/// The widest one of this CPU.
inline VectorIsa vector_isa() {
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512) return VectorIsa::kAvx512;
  return __builtin_cpu_supports("avx2") ? VectorIsa::kAvx2 : VectorIsa::kSse2;
}

}  // namespace gatefold
