#pragma once

/// A kernel's dynamic shared memory, 16-byte aligned. Only nvcc's sources include this: what
/// compiles kernels for the host has its own.
#define DYNAMIC_SHARED(type, name)                              \
  extern __shared__ __align__(16) unsigned char name##_bytes[]; \
  type* const name = reinterpret_cast<type*>(name##_bytes)
