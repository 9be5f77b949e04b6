// Argument checks. Each names the op, the argument, the rule and the value that broke it. meta/_checks.py says the same
// in the same words for fake tensors; tests/test_errors.py compares the two.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

#include "common/paged_cache.h"
#include "common/stable.h"

namespace mqa {

template <typename... Parts>
[[noreturn]] void refuse(const char* op, const Parts&... parts) {
  std::ostringstream text;
  text << op << ": ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// "[3, 64]"
template <typename Sizes>
std::string list_text(const Sizes& values) {
  std::ostringstream text;
  const char* separator = "[";
  for (const int64_t value : values) {
    text << separator << value;
    separator = ", ";
  }
  text << (values.size() == 0 ? "[]" : "]");
  return text.str();
}

// "8, 16 or 32"
template <typename Values, typename Name>
std::string choice_text(const Values& values, const Name& name) {
  std::ostringstream text;
  size_t position = 0;
  for (const auto& value : values) {
    if (position > 0) text << (position + 1 == values.size() ? " or " : ", ");
    text << name(value);
    ++position;
  }
  return text.str();
}

inline void check_dtype(const char* op, const char* name, ScalarType dtype, std::initializer_list<ScalarType> allowed) {
  for (const ScalarType candidate : allowed) {
    if (dtype == candidate) return;
  }
  refuse(op, name, " must be ", choice_text(allowed, dtype_name), ", got ", dtype_name(dtype));
}

inline void check_dtype(const char* op, const char* name, const Tensor& tensor,
                        std::initializer_list<ScalarType> allowed) {
  check_dtype(op, name, tensor.scalar_type(), allowed);
}

inline void check_rank(const char* op, const char* name, const Tensor& tensor, int64_t rank, const char* shape) {
  if (tensor.dim() == rank) return;
  refuse(op, name, " must have shape ", shape, ", got ", list_text(tensor.sizes()));
}

inline void check_shape(const char* op, const char* name, const Tensor& tensor, const char* shape,
                        std::initializer_list<int64_t> sizes) {
  bool equal = tensor.dim() == static_cast<int64_t>(sizes.size());
  int64_t dim = 0;
  for (const int64_t size : sizes) {
    equal = equal && tensor.size(dim) == size;
    ++dim;
  }
  if (!equal)
    refuse(op, name, " must have shape ", shape, " = ", list_text(sizes), ", got ", list_text(tensor.sizes()));
}

// One size or integer argument out of a short list; `what` names it, as in "q must have H".
inline void check_choice(const char* op, const char* what, int64_t value, std::initializer_list<int64_t> allowed) {
  for (const int64_t candidate : allowed) {
    if (value == candidate) return;
  }
  refuse(op, what, " of ", choice_text(allowed, [](int64_t v) { return v; }), ", got ", value);
}

inline void check_range(const char* op, const char* what, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) refuse(op, what, " from ", low, " to ", high, ", got ", value);
}

// The last `count` dimensions are laid out without gaps. Strides of dimensions of size 1 do not matter.
inline void check_inner_contiguous(const char* op, const char* name, const Tensor& tensor, int count = 1) {
  static constexpr const char* kWords[] = {"", "last dimension", "last two dimensions", "last three dimensions"};
  int64_t expected = 1;
  for (int64_t dim = tensor.dim() - 1; dim >= tensor.dim() - count; --dim) {
    if (tensor.size(dim) != 1 && tensor.stride(dim) != expected) {
      refuse(op, name, " must be contiguous in its ", kWords[count], ", got shape ", list_text(tensor.sizes()),
             " with strides ", list_text(tensor.strides()));
    }
    expected *= tensor.size(dim);
  }
}

inline void check_device(const char* op, const char* name, const Tensor& tensor, const char* reference_name,
                         const Tensor& reference) {
  if (tensor.device() == reference.device()) return;
  refuse(op, name, " must be on ", device_name(reference), " like ", reference_name, ", got ", device_name(tensor));
}

inline void check_aligned(const char* op, const char* name, const Tensor& tensor, int64_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  if (address % bytes != 0) {
    refuse(op, name, " must start at a multiple of ", bytes, " bytes, got an address ", address % bytes,
           " bytes past one");
  }
}

// A pool for tokens of D elements: uint8 [blocks, S, 1, D + 4], or, of MXFP4, [blocks, S, 1, D/2 + D/32].
PagedCache check_cache(const char* op, const char* name, const Tensor& cache, CacheFormat format, int64_t head_dim,
                       bool interleaved_scales = false);

// Written tensors: no element may stand on another's memory. Covers what callers produce (expanded tensors, short
// pitches, overlapping windows): dimensions sorted by stride, each must step over all that lies inside it.
void check_no_internal_overlap(const char* op, const char* name, const Tensor& tensor);

// `written` shares no byte with `other`. Interleaved tensors (columns of one workspace) are told apart exactly.
void check_disjoint(const char* op, const char* name, const Tensor& written, const char* other_name,
                    const Tensor& other);

}  // namespace mqa
