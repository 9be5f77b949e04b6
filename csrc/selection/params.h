// What a selection kernel is given: sizes, strides and pointers, checked by host.cpp. Strides count elements of the
// tensor they belong to. The contents behind the pointers are untrusted.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/paged_cache.h"

namespace mqa::selection {

constexpr int kMaxK = 4096;

// A row's part that takes part: its first column, and how many.
struct Span {
  int64_t start, length;
};

struct TopkParams {
  const void* logits;  // [rows, width]
  FloatType type;
  int64_t rows;
  int64_t width;
  int64_t row_stride;

  const int32_t* lengths;  // [rows]
  int64_t lengths_stride;
  const int32_t* starts;  // [rows], or nullptr: 0
  int64_t starts_stride;

  int64_t k;

  // Positions become slots of a paged cache unless block_size is 0.
  const int32_t* block_tables;  // [tables, table_width]
  int64_t table_width;
  int64_t table_stride;
  int64_t rows_per_table;
  uint32_t block_size;

  int32_t* out;  // [rows, k]
  int64_t out_stride;

  MQA_HOST_DEVICE Span span(int64_t row) const {
    const int64_t given = starts == nullptr ? 0 : starts[row * starts_stride];
    const int64_t start = given < 0 ? 0 : given < width ? given : width;
    const int64_t length = lengths[row * lengths_stride];
    return {start, length < 0 ? 0 : length < width - start ? length : width - start};
  }

  MQA_HOST_DEVICE const int32_t* table(int64_t row) const {
    return block_size == 0 ? nullptr : block_tables + row / rows_per_table * table_stride;
  }

  // What stands for a position in the result of a row with that table; -1 if it is dropped: no page, or a slot that is
  // no int32.
  MQA_HOST_DEVICE int32_t result(const int32_t* table, uint32_t position) const {
    if (block_size == 0) return static_cast<int32_t>(position);
    const uint32_t column = position / block_size;
    if (column >= table_width) return -1;
    const int64_t page = table[column];
    const int64_t slot = page * block_size + (position - column * block_size);
    return page < 0 || slot > INT32_MAX ? -1 : static_cast<int32_t>(slot);
  }
};

// Unsigned numbers that stand in the order of the floats they are made of: NaN lowest and all alike, both zeros alike.
// None is 0.
constexpr uint32_t kNanKey = 1;
MQA_HOST_DEVICE inline uint32_t order_key(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t flipped = bits >> 31 ? 0xffffffffu : 0x80000000u;
  const uint32_t key = magnitude == 0 ? 0x80000000u : bits ^ flipped;
  return magnitude > 0x7f800000u ? kNanKey : key;  // without branches, so that loops become vector code
}

// 16-bit floats as bits that order_key() puts in their order.
MQA_HOST_DEVICE inline uint32_t order_bits_of_bfloat16(uint16_t bits) { return uint32_t{bits} << 16; }
MQA_HOST_DEVICE inline uint32_t order_bits_of_float16(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7fffu;
  return uint32_t{bits & 0x8000u} << 16 | (magnitude > 0x7c00u ? 0x7fc00000u : magnitude << 13);
}

// A radix search for the k-th largest key looks at these bits in turn.
constexpr int kDigits = 3;
struct Digit {
  int shift, bits;
};
MQA_HOST_DEVICE constexpr Digit digit(int i) { return i == 0 ? Digit{21, 11} : i == 1 ? Digit{10, 11} : Digit{0, 10}; }
constexpr int kBins = 1 << 11;

}  // namespace mqa::selection
