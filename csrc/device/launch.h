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

// The most blocks that a cluster of `kernel` may have on the current device, `device`, where a block has so many
// threads and bytes of shared memory: a power of two, 0 without clusters.
template <auto kernel>
int cluster_limit(int device, int threads, int shared_bytes) {
  static std::array<int, kMaxDevices> limits;
  static std::array<std::once_flag, kMaxDevices> once;
  const KernelFacts& facts = kernel_facts<kernel>(device);
  if (facts.binary_version < 90) return 0;
  std::call_once(once[device], [=] {
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1024);
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    int most = 0;
    STD_CUDA_CHECK(cudaOccupancyMaxPotentialClusterSize(&most, kernel, &config));
    for (limits[device] = 1; 2 * limits[device] <= most;) limits[device] *= 2;
  });
  return limits[device];
}

struct Grid {
  int blocks, threads;
  int shared_bytes = 0;
  bool overlap =
      false;        // the start may overlap the end of the kernel in front: wait_for_previous_kernel(), mbarrier.cuh
  int cluster = 1;  // blocks
};

// On the current stream.
template <typename... Parameters>
void launch(void (*kernel)(Parameters...), const Grid& grid, int device, Parameters... parameters) {
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (grid.overlap) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = static_cast<size_t>(grid.shared_bytes);
  config.stream = current_stream(device);
  config.attrs = attributes;
  config.numAttrs = count;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, parameters...));
}

}  // namespace mqa::device
