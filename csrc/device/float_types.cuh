// Conversions between float32 and the 8- and 16-bit float types, and unaligned 16-byte loads.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "common/dtype.h"

namespace mqa::device {

// e4m3 codes 2i and 2i + 1 of a word as half2 bits: exact, NaN stays NaN. One instruction from sm_89 on, which
// cuda_fp8.h emulates before.
__device__ __forceinline__ uint32_t half2_from_e4m3x2(uint32_t codes) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  return static_cast<uint32_t>(pair.x) | static_cast<uint32_t>(pair.y) << 16;
}

// Two e2m1 codes, the nibbles of the low byte, as half2 bits times 2^-14: their exponent and mantissa bits, where a
// half has its own.
__device__ __forceinline__ uint32_t half2_from_e2m1x2(uint32_t codes) {
  const uint32_t spread = (codes & 0xf) | (codes & 0xf0) << 12;
  return (spread & 0x00070007u) << 9 | (spread & 0x00080008u) << 12;
}

__device__ __forceinline__ uint32_t multiply_half2(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// max(x, 0) of both halves, NaN kept.
__device__ __forceinline__ uint32_t relu_half2(uint32_t x) {
  uint32_t result;
  asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(0x3c003c00u), "r"(0x80008000u));
  return result;
}

// Nearest e4m3 codes (low byte first), ties to even, saturating; NaN gives 0x7F.
__device__ __forceinline__ uint32_t e4m3x2_from_floats(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

// Loads here are ordinary, not those for constants: a kernel may be there while the one in front still writes its
// inputs.
__device__ __forceinline__ float load_float(const void* data, FloatType type, int64_t index) {
  switch (type) {
    case FloatType::kBFloat16: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    case FloatType::kFloat16: return __half2float(static_cast<const __half*>(data)[index]);
    default: return static_cast<const float*>(data)[index];
  }
}

__device__ __forceinline__ void store_float(void* data, FloatType type, int64_t index, float value) {
  switch (type) {
    case FloatType::kBFloat16: static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value); break;
    case FloatType::kFloat16: static_cast<__half*>(data)[index] = __float2half_rn(value); break;
    default: static_cast<float*>(data)[index] = value;
  }
}

// Loads and stores of `Vector` (uint2, uint4, float4) at an address that callers' views may have left unaligned.
template <typename Vector>
__device__ __forceinline__ Vector load_any(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(Vector) == 0) return *static_cast<const Vector*>(address);
  Vector value;
  for (int i = 0; i < static_cast<int>(sizeof(Vector)); ++i) {
    reinterpret_cast<uint8_t*>(&value)[i] = static_cast<const uint8_t*>(address)[i];
  }
  return value;
}

template <typename Vector>
__device__ __forceinline__ void store_any(void* address, Vector value) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(Vector) == 0) {
    *static_cast<Vector*>(address) = value;
    return;
  }
  for (int i = 0; i < static_cast<int>(sizeof(Vector)); ++i) {
    static_cast<uint8_t*>(address)[i] = reinterpret_cast<const uint8_t*>(&value)[i];
  }
}

// max(x, 0) that keeps NaN.
__device__ __forceinline__ float relu(float x) {
  float result;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace mqa::device
