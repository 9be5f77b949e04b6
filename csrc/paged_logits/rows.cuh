// Which columns of which rows are live, and the walk over the requests of a worker's range.
#pragma once

#include <cstdint>

#include "device/float_types.cuh"
#include "paged_logits/schedule.cuh"

namespace mqa::paged_logits {

// The limit of row (request, slot): columns below it are live.
__device__ __forceinline__ int row_limit(const LogitsParams& p, int request, int slot) {
  const int64_t limit = p.lengths_per_slot ? int64_t{load_length(p.lengths, request, slot)}
                                           : load_length(p.lengths, request, 0) - p.next_n + slot + 1;
  return static_cast<int>(min(max(limit, int64_t{0}), p.capacity));
}

__device__ __forceinline__ int request_limit(const LogitsParams& p, int request) {
  return static_cast<int>(min(request_length(p.lengths, request), p.capacity));
}

template <int kTileTokens>
__device__ __forceinline__ int tiles_of(int limit) {
  return static_cast<int>((static_cast<unsigned>(limit) + kTileTokens - 1) / kTileTokens);
}

// A run of the walk: `tiles` tiles from `begin` on, or up to `end`, whichever comes first.
struct Run {
  Position begin, end;
  int tiles;
};

// Limits of the 32 requests from `first` on, a lane each (0 for those that do not exist): one load where a walk would
// make one per request.
struct LimitWindow {
  int first;
  int limit;
};

__device__ __forceinline__ LimitWindow load_limits(const LogitsParams& p, int first) {
  const int64_t request = int64_t{first} + threadIdx.x % kWarpThreads;
  return {first,
          request < p.batch ? static_cast<int>(min(request_length(p.lengths, request, peek_length), p.capacity)) : 0};
}

// The requests of a run and their tiles of kTileTokens. All lanes of a warp hold the same values, but for the window.
template <int kTileTokens>
struct RequestWalk {
  Run run;
  int tiles_per_unit;
  LimitWindow window;
  int request, limit;
  int first_tile, last_tile;  // of this request, last excluded

  __device__ RequestWalk(const Run& whole, int unit_tiles, LimitWindow limits)
      : run(whole), tiles_per_unit(unit_tiles), window(limits), request(whole.begin.request) {
    enter(run.begin.unit);
  }
  __device__ RequestWalk(const LogitsParams& p, Position begin, Position end, int unit_tiles)
      : RequestWalk({begin, end, INT32_MAX}, unit_tiles, load_limits(p, begin.request)) {}

  __device__ bool done() const {
    return run.tiles == 0 || request > run.end.request || (request == run.end.request && run.end.unit == 0);
  }

  // Moves on to the next request with anything to score: padded batches have long runs of empty ones.
  __device__ void next_request(const LogitsParams& p) {
    run.tiles -= max(last_tile - first_tile, 0);
    ++request;
    while (!done()) {
      if (request >= window.first + kWarpThreads) window = load_limits(p, request);
      const int candidate = window.first + static_cast<int>(threadIdx.x) % kWarpThreads;
      const unsigned found = __ballot_sync(~0u, candidate >= request && window.limit > 0);
      request = window.first + (found != 0 ? __ffs(found) - 1 : kWarpThreads);
      if (found != 0) break;
    }
    enter(0);
  }

 private:
  __device__ void enter(int first_unit) {
    limit = done() ? 0 : __shfl_sync(~0u, window.limit, request - window.first);
    first_tile = first_unit * tiles_per_unit;
    last_tile = tiles_of<kTileTokens>(limit);
    if (request == run.end.request) last_tile = min(last_tile, run.end.unit * tiles_per_unit);
    if (last_tile - first_tile > run.tiles) last_tile = first_tile + run.tiles;
  }
};

// All tiles of a batch of at most 1024 requests, counted by one warp alone; together they fit an int. A lane has the
// tiles of a window of 32 requests.
template <int kTileTokens>
struct TileMap {
  static constexpr int kHeld = 4;  // windows that stay in registers
  int batch;
  int held[kHeld];
  int before, after;  // tiles in front of the lane's window, and of its end
  int total;

  __device__ TileMap(const LogitsParams& p) : batch(static_cast<int>(p.batch)) {
    const int lane = threadIdx.x % kWarpThreads;
    int own = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i] = i * kWarpThreads < batch ? load_limits(p, i * kWarpThreads).limit : 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int tiles = __reduce_add_sync(~0u, tiles_of<kTileTokens>(held[i]));
      if (lane == i) own = tiles;
    }
#pragma unroll 4
    for (int i = kHeld; i * kWarpThreads < batch; ++i) {
      const int tiles = __reduce_add_sync(~0u, tiles_of<kTileTokens>(load_limits(p, i * kWarpThreads).limit));
      if (lane == i) own = tiles;
    }
    after = inclusive_sum(own);
    before = after - own;
    total = __shfl_sync(~0u, after, kWarpThreads - 1);
  }

  // Whether both were made of the same lengths; false where they do not hold them all.
  __device__ bool equals(const TileMap& other) const {
    bool same = batch <= kHeld * kWarpThreads;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) same = same && held[i] == other.held[i];
    return __all_sync(~0u, same);
  }

  // The walk over `tiles` tiles from tile number `tile` on.
  __device__ RequestWalk<kTileTokens> walk(const LogitsParams& p, int tile, int tiles) const {
    Run run{{batch, 0}, {batch, 0}, tiles};
    LimitWindow window{batch, 0};
    const unsigned owner = __ballot_sync(~0u, before <= tile && tile < after);
    if (owner != 0) {
      const int i = __ffs(owner) - 1;
      window = {i * kWarpThreads, held[0]};
      if (i == 1) window.limit = held[1];
      if (i == 2) window.limit = held[2];
      if (i == 3) window.limit = held[3];
      if (i >= kHeld) window = load_limits(p, i * kWarpThreads);
      const int in_window = tile - __shfl_sync(~0u, before, i);
      const int own = tiles_of<kTileTokens>(window.limit);
      const int end = inclusive_sum(own);
      // The lengths may have changed since they were counted: then there may be no such lane.
      const unsigned found = __ballot_sync(~0u, in_window < end);
      const int lane = found != 0 ? __ffs(found) - 1 : kWarpThreads - 1;
      run.begin = {window.first + lane, in_window - __shfl_sync(~0u, end - own, lane)};
    }
    return {run, 1, window};
  }

  __device__ static int inclusive_sum(int value) {
#pragma unroll
    for (int offset = 1; offset < kWarpThreads; offset *= 2) {
      const int below = __shfl_up_sync(~0u, value, offset);
      if (static_cast<int>(threadIdx.x) % kWarpThreads >= offset) value += below;
    }
    return value;
  }
};

// Columns that no tile covers, for clean_logits, by one of `warps` warps. Each row's are shared out among so many of
// them that the items are many times the warps: rows may differ a lot.
template <int kTileTokens>
__device__ void fill_dead_columns(const LogitsParams& p, int warp, int warps) {
  constexpr int64_t kItemsPerWarp = 8;
  const int lane = threadIdx.x % kWarpThreads;
  const int64_t rows = p.batch * p.next_n;
  const int64_t parts = max(kItemsPerWarp * warps / rows, int64_t{1});
  const int request_rows = static_cast<int>(p.next_n);
#pragma unroll 1
  for (int64_t item = warp; item < rows * parts; item += warps) {
    const int64_t row = parts == 1 ? item : item / parts;
    const int64_t part = item - row * parts;
    const int64_t limit = request_limit(p, static_cast<int>(row / request_rows));
    const int64_t scored = (limit + kTileTokens - 1) / kTileTokens * kTileTokens;
    const int64_t share = (max(p.max_seq_len - scored, int64_t{0}) + parts - 1) / parts;
    const int64_t last = min(scored + (part + 1) * share, p.max_seq_len);
#pragma unroll 4
    for (int64_t column = scored + part * share + lane; column < last; column += kWarpThreads) {
      device::store_float(p.out, p.out_type, row * p.out_stride + column, -INFINITY);
    }
  }
}

}  // namespace mqa::paged_logits
