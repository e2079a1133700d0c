#pragma once

#include <nvtx3/nvToolsExt.h>

namespace gatefold {

/// Named ranges of the calling thread, in a domain of Gatefold's own: Nsight Systems shows them
/// above the kernels that they started. Without a profiler they do nothing.
class CudaRanges {
 public:
  CudaRanges() : domain_(nvtxDomainCreateA("Gatefold")) {}
  ~CudaRanges() { nvtxDomainDestroy(domain_); }
  CudaRanges(const CudaRanges&) = delete;
  CudaRanges& operator=(const CudaRanges&) = delete;

  void begin(const char* name) {
    nvtxEventAttributes_t range{};
    range.version = NVTX_VERSION;
    range.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    range.messageType = NVTX_MESSAGE_TYPE_ASCII;
    range.message.ascii = name;
    nvtxDomainRangePushEx(domain_, &range);
  }
  void end() { nvtxDomainRangePop(domain_); }

 private:
  nvtxDomainHandle_t domain_;
};

}  // namespace gatefold
