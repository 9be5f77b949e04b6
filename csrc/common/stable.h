// The one door to torch: every torch header, alias and workaround of this library stands here.
//
// Only the LibTorch stable ABI (target 2.11) is used, so one binary serves every later torch and every Python:
// https://docs.pytorch.org/docs/stable/notes/libtorch_stable_abi.html
#pragma once

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"  // torch's headers are not clean under -Wextra
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/DeviceType.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Half.h>
#pragma GCC diagnostic pop

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "common/dtype.h"

namespace mqa {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The name Python gives a dtype, without "torch.".
inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::UInt16: return "uint16";
    case ScalarType::UInt32: return "uint32";
    case ScalarType::UInt64: return "uint64";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Bool: return "bool";
    case ScalarType::ComplexHalf: return "complex32";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    case ScalarType::Float8_e4m3fnuz: return "float8_e4m3fnuz";
    case ScalarType::Float8_e5m2fnuz: return "float8_e5m2fnuz";
    case ScalarType::Float8_e8m0fnu: return "float8_e8m0fnu";
    case ScalarType::Float4_e2m1fn_x2: return "float4_e2m1fn_x2";
    default: return "a dtype unknown to torch_mqa_ops";
  }
}

inline FloatType float_type(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16: return FloatType::kBFloat16;
    case ScalarType::Half: return FloatType::kFloat16;
    default: return FloatType::kFloat32;
  }
}

// The name Python gives a device: "cpu", "cuda:1".
inline std::string device_name(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  return "a device that is neither CPU nor CUDA";
}

// out = a @ b. The out form, because autocast would send matmul to bfloat16 and because it allocates nothing; the
// stable API has no wrapper for it.
inline void mm_out(const Tensor& out, const Tensor& a, const Tensor& b) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(a), torch::stable::detail::from(b),
                                    torch::stable::detail::from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // takes over the reference that mm.out returns
}

#ifdef USE_CUDA
// The stable API has no native stream handle before 2.13 (Stream::id() is not one), so the shim that AOTInductor's own
// code calls is used; it lives in libtorch_cuda, which is why the CUDA kernels are a library of their own.
inline void* current_cuda_stream(int32_t device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return stream;
}
#endif

}  // namespace mqa
