// Which columns of which rows are live, and the walk over the requests of a worker's range.
#pragma once

#include <cstdint>

#include "device/float_types.cuh"
#include "paged_logits/schedule.cuh"

namespace mqa::paged_logits {

// The limit of row (request, slot): columns below it are live.
__device__ __forceinline__ int row_limit(const LogitsParams& p, int request, int slot) {
  const int64_t limit = p.lengths_per_slot ? load_length(p.lengths, request, slot)
                                           : load_length(p.lengths, request, 0) - p.next_n + slot + 1;
  return static_cast<int>(min(max(limit, int64_t{0}), p.capacity));
}

__device__ __forceinline__ int request_limit(const LogitsParams& p, int request) {
  return static_cast<int>(min(request_length(p.lengths, request), p.capacity));
}

// The requests of a range and their tiles of kTileTokens. All lanes of a warp hold the same values.
template <int kTileTokens>
struct RequestWalk {
  Position end;
  int tiles_per_unit;
  int request, limit;
  int first_tile, last_tile;  // of this request, last excluded

  __device__ RequestWalk(const LogitsParams& p, Position begin, Position last, int unit_tiles)
      : end(last), tiles_per_unit(unit_tiles), request(begin.request) {
    enter(p, begin.unit);
  }

  __device__ bool in_range(int candidate) const {
    return candidate < end.request || (candidate == end.request && end.unit > 0);
  }
  __device__ bool done() const { return !in_range(request); }

  // Moves on to the next request with anything to score; the lanes look at 32 at a time, since padded batches have long
  // runs of empty ones.
  __device__ void next_request(const LogitsParams& p) {
    ++request;
    while (!done()) {
      const int candidate = request + static_cast<int>(threadIdx.x) % kWarpThreads;
      const unsigned found = __ballot_sync(~0u, in_range(candidate) && request_limit(p, candidate) > 0);
      request += found != 0 ? __ffs(found) - 1 : kWarpThreads;
      if (found != 0) break;
    }
    enter(p, 0);
  }

 private:
  __device__ void enter(const LogitsParams& p, int first_unit) {
    limit = done() ? 0 : request_limit(p, request);
    first_tile = first_unit * tiles_per_unit;
    last_tile = static_cast<int>((int64_t{limit} + kTileTokens - 1) / kTileTokens);
    if (request == end.request) last_tile = min(last_tile, end.unit * tiles_per_unit);
  }
};

// Columns that no tile covers, for clean_logits; rows are dealt out in pieces over `warps` warps, of which this is one.
template <int kTileTokens>
__device__ void fill_dead_columns(const LogitsParams& p, int64_t warp, int64_t warps) {
  constexpr int64_t kPiece = 1024;
  const int lane = threadIdx.x % kWarpThreads;
  const int64_t pieces = (p.max_seq_len + kPiece - 1) / kPiece;
#pragma unroll 1
  for (int64_t item = warp; item < p.batch * p.next_n * pieces; item += warps) {
    const int64_t row = item / pieces;
    const int64_t limit = request_limit(p, static_cast<int>(row / p.next_n));
    const int64_t scored = (limit + kTileTokens - 1) / kTileTokens * kTileTokens;
    const int64_t first = item % pieces * kPiece;
    const int64_t last = min(first + kPiece, p.max_seq_len);
#pragma unroll 1
    for (int64_t column = max(first, scored) + lane; column < last; column += kWarpThreads) {
      device::store_float(p.out, p.out_type, row * p.out_stride + column, -INFINITY);
    }
  }
}

}  // namespace mqa::paged_logits
