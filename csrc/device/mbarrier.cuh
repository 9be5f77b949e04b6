// Barriers in shared memory that count arrivals and copied bytes, and the bulk copies that complete on them (sm_90).
// Shared memory is named by 32-bit addresses. A barrier's phases alternate in parity, from 0 on; a wait for parity 1 on
// a fresh barrier returns at once. A waiter must not be two phases behind: it could not tell.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace mqa::device {

// Opaque to the compiler, which would else compute it anew at every use.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  auto address = static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
  asm volatile("" : "+r"(address));
  return address;
}

__device__ __forceinline__ int load_shared_int(uint32_t address) {
  int value;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ float load_shared_float(uint32_t address) {
  return __int_as_float(load_shared_int(address));
}
__device__ __forceinline__ int load_shared_byte(uint32_t address) {
  int value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ int2 load_shared_int2(uint32_t address) {
  int2 value;
  asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ int4 load_shared_int4(uint32_t address) {
  int4 value;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}
__device__ __forceinline__ void store_shared(uint32_t address, int value) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_shared_byte(uint32_t address, uint8_t value) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(static_cast<uint32_t>(value)) : "memory");
}
__device__ __forceinline__ void store_shared_half(uint32_t address, __half value) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(__half_as_ushort(value)) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, float value) {
  store_shared(address, __float_as_int(value));
}
__device__ __forceinline__ void store_shared(uint32_t address, int4 value) {
  asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint4 value) {
  store_shared(address, int4{static_cast<int>(value.x), static_cast<int>(value.y), static_cast<int>(value.z),
                             static_cast<int>(value.w)});
}

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine; a __syncthreads() must follow.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Makes this thread's writes to shared memory visible to the copy engine and to the matrix unit.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives and makes the phase wait for `bytes` more of copies.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Makes the phase wait for `bytes` more of copies; an arrival of this phase must follow.
__device__ __forceinline__ void expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// How the L2 cache is to treat what is read once: first to go.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Global to shared memory; both addresses and the size are multiples of 16.
__device__ __forceinline__ void copy_bulk(uint32_t shared, const void* global, int bytes, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// The box of a 3-D tensor that starts at (x, y, z).
__device__ __forceinline__ void copy_box(uint32_t shared, const CUtensorMap* map, int x, int y, int z, uint32_t barrier,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
      : "memory");
}

// The box of a 4-D tensor that starts at (x, y, z, w).
__device__ __forceinline__ void copy_box(uint32_t shared, const CUtensorMap* map, int x, int y, int z, int w,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}

// Brings the cache line of `address` to the L2 cache, where later writes by anyone still reach it.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Programmatic dependent launch: what a kernel does before `wait_for_previous_kernel` may overlap the kernel in front
// of it in the stream, whose writes are visible after it. `allow_next_kernel` lets the next one start early in the same
// way. On older GPUs kernels do not overlap.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace mqa::device
