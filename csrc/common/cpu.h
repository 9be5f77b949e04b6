// What CPU kernels share.
#pragma once

#include "common/dtype.h"
#include "common/stable.h"

// Compiles a hot loop for several instruction sets, the best of which is chosen when the library is loaded: one binary
// serves every x86-64. Elsewhere the compiler's target is what it is.
#if defined(__x86_64__) && !defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 12  // older ones know no x86-64-v3
#define MQA_CPU_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MQA_CPU_CLONES
#endif

namespace mqa {

inline float load_float(const void* data, FloatType type, int64_t index) {
  switch (type) {
    case FloatType::kBFloat16: return static_cast<const torch::headeronly::BFloat16*>(data)[index];
    case FloatType::kFloat16: return static_cast<const torch::headeronly::Half*>(data)[index];
    default: return static_cast<const float*>(data)[index];
  }
}

inline void store_float(void* data, FloatType type, int64_t index, float value) {
  switch (type) {
    case FloatType::kBFloat16: static_cast<torch::headeronly::BFloat16*>(data)[index] = value; break;
    case FloatType::kFloat16: static_cast<torch::headeronly::Half*>(data)[index] = value; break;
    default: static_cast<float*>(data)[index] = value;
  }
}

}  // namespace mqa
