// Clusters, from sm_90 on: blocks that run at once and reach each other's shared memory.
#pragma once

#include <cstdint>

namespace mqa::device {

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ int cluster_size() {
  int blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}

// All threads of all blocks that have not ended. What each wrote to shared memory before is seen by all after.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where another block of the cluster has what this one has at `shared`. That block must not have ended.
template <typename T>
__device__ __forceinline__ T* shared_of(T* shared, int rank) {
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(shared), "r"(rank));
  return reinterpret_cast<T*>(address);
}

}  // namespace mqa::device
