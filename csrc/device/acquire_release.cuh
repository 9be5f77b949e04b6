// Accesses to global memory that order a thread's other accesses for the whole device.
#pragma once

#include <cstdint>

namespace mqa::device {

// Puts `value` there and returns what was there; nothing after it happens before it.
__device__ __forceinline__ uint64_t exchange_acquire(void* address, uint64_t value) {
  uint64_t found;
  asm volatile("atom.acquire.gpu.global.exch.b64 %0, [%1], %2;" : "=l"(found) : "l"(address), "l"(value) : "memory");
  return found;
}

// All that happened before, in this thread or seen by it, is seen by whoever acquires `value`.
__device__ __forceinline__ void store_release(void* address, uint64_t value) {
  asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

}  // namespace mqa::device
