// cp.async: global to shared memory without registers, tracked per thread (sm_80 and later).
#pragma once

#include <cstdint>

namespace mqa::device {

__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}

// 4, 8 or 16 bytes, as aligned, to a shared address.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(kBytes) : "memory");
}

// Closes the group of copies that this thread has started since the last call.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Newer` of this thread's groups are still under way.
template <int Newer>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Newer) : "memory");
}

}  // namespace mqa::device
