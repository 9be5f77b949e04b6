// Host side of a launch: what a kernel may use on a device, found out once.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <mutex>

#include "common/stable.h"

namespace mqa::device {

constexpr int kMaxDevices = 64;

struct KernelFacts {
  int multiprocessors;
  int dynamic_shared_limit;  // bytes a block may ask for at launch
  int ptx_version;           // architecture the loaded code was written for: 10 x major + minor
  int binary_version;        // and the one it was compiled for
};

// Facts about `kernel` on the current device, which is `device`. The first call loads the kernel into the device's
// context and raises its shared-memory limit; neither is a stream operation, so this may happen under graph capture.
template <auto kernel>
const KernelFacts& kernel_facts(int device) {
  static std::array<KernelFacts, kMaxDevices> facts;
  static std::array<std::once_flag, kMaxDevices> once;
  STD_TORCH_CHECK(device < kMaxDevices, "torch_mqa_ops serves devices 0 to ", kMaxDevices - 1, ", got ", device);
  std::call_once(once[device], [device] {
    KernelFacts& found = facts[device];
    cudaFuncAttributes attributes;
    int opt_in = 0;
    STD_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&opt_in, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&found.multiprocessors, cudaDevAttrMultiProcessorCount, device));
    found.dynamic_shared_limit = opt_in - static_cast<int>(attributes.sharedSizeBytes);
    found.ptx_version = attributes.ptxVersion;
    found.binary_version = attributes.binaryVersion;
    STD_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, found.dynamic_shared_limit));
  });
  return facts[device];
}

inline cudaStream_t current_stream(int device) { return static_cast<cudaStream_t>(current_cuda_stream(device)); }

// Launches on the current stream; with `overlap` the start may overlap the end of the kernel in front, and the kernel's
// code must call wait_for_previous_kernel() (mbarrier.cuh).
template <typename... Parameters>
void launch_overlapping(void (*kernel)(Parameters...), int blocks, int threads, int shared_bytes, int device,
                        bool overlap, Parameters... parameters) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = current_stream(device);
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, parameters...));
}

}  // namespace mqa::device
