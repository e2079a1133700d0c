#pragma once

// Device functions that CUDA's headers leave out for a host compiler; the rest of device_shim.h.

// Compile with -ffp-contract=off: one rounding each.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0F / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __expf(float a) { return std::exp(a); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float a) { return 1.0F / std::sqrt(a); }

inline int __float_as_int(float a) { return std::bit_cast<int>(a); }
inline unsigned __float_as_uint(float a) { return std::bit_cast<unsigned>(a); }
inline float __int_as_float(int a) { return std::bit_cast<float>(a); }
inline float __uint_as_float(unsigned a) { return std::bit_cast<float>(a); }

inline int __popc(unsigned a) { return std::popcount(a); }
inline int __popcll(unsigned long long a) { return std::popcount(a); }
inline int __clz(int a) { return std::countl_zero(static_cast<unsigned>(a)); }
inline int __clzll(long long a) { return std::countl_zero(static_cast<unsigned long long>(a)); }
inline int __ffs(int a) { return a == 0 ? 0 : std::countr_zero(static_cast<unsigned>(a)) + 1; }

template <typename T>
T min(T a, T b) {
  return std::min(a, b);
}
template <typename T>
T max(T a, T b) {
  return std::max(a, b);
}

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}

template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T>
T __ldcs(const T* address) {
  return *address;
}
template <typename T>
void __stcg(T* address, T value) {
  *address = value;
}
template <typename T>
void __stcs(T* address, T value) {
  *address = value;
}

template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return gatefold_fake::atomic_change(address, [=](T old) { return static_cast<T>(old + value); });
}
template <typename T>
T atomicSub(T* address, std::type_identity_t<T> value) {
  return gatefold_fake::atomic_change(address, [=](T old) { return static_cast<T>(old - value); });
}
template <typename T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return gatefold_fake::atomic_change(address, [=](T old) { return std::max(old, value); });
}
template <typename T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  return gatefold_fake::atomic_change(address, [=](T old) { return std::min(old, value); });
}
template <typename T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  return gatefold_fake::atomic_change(address, [=](T old) { return static_cast<T>(old | value); });
}
template <typename T>
T atomicAnd(T* address, std::type_identity_t<T> value) {
  return gatefold_fake::atomic_change(address, [=](T old) { return static_cast<T>(old & value); });
}
template <typename T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return gatefold_fake::atomic_change(address, [=](T) { return value; });
}
template <typename T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return gatefold_fake::atomic_change(address,
                                      [=](T old) { return old == expected ? value : old; });
}
