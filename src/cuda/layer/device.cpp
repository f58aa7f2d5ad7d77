// SPDX-License-Identifier: Apache-2.0
#include "cuda/layer/device.hpp"

#include <atomic>
#include <string>

#include "cuda/host/outside_capture.hpp"
#include "cuda/layer/architecture.hpp"
#include "cuda/layer/backend.hpp"
#include "cuda/layer/error_word.hpp"

namespace tessera::cuda {
namespace {

bool is_driver_there() noexcept {
  int version = 0;
  bool const none = cudaDriverGetVersion(&version) == cudaSuccess && version == 0;
  cudaGetLastError();  // leaves nothing behind for the caller's own calls
  return !none;
}

/// The runtime calls a missing driver too old.
char const* reason(cudaError_t error) noexcept {
  return is_driver_there() ? cudaGetErrorString(error) : "this machine has no NVIDIA driver";
}

Status environment(std::int32_t index, cudaError_t error) noexcept {
  char const* const why = reason(error);
  char const* const known = is_driver_there() ? host::remedy(error) : nullptr;
  return Status::error(StatusCode::environment, "device cuda:%d: %s; %s%suse device cpu", index,
                       why, known != nullptr ? known : "", known != nullptr ? "; or " : "");
}

struct Facts {
  int major = 0, minor = 0, sm_count = 0;
  char name[256] = "";
};

Status read_facts(std::int32_t index, Facts& facts) noexcept {
  int devices = 0;
  cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) return environment(index, error);
  if (index < 0 || index >= devices) {
    return Status::error(StatusCode::environment,
                         "device cuda:%d: this machine has %d; count from 0, or use device cpu",
                         index, devices);
  }
  cudaDeviceProp properties;
  error = cudaGetDeviceProperties(&properties, index);
  if (error != cudaSuccess) return environment(index, error);
  facts.major = properties.major;
  facts.minor = properties.minor;
  facts.sm_count = properties.multiProcessorCount;
  std::snprintf(facts.name, sizeof(facts.name), "%s", properties.name);
  return {};
}

/// Names the kernels that the build has.
std::string kernels_of(Built built) {
  std::string text = built.sm_90 ? "bf16, kernels for sm_90a" : "bf16, kernels";
  if (!built.sm_100) return text;
  return text + (built.sm_90 ? " and for sm_100a (" : " for sm_100a (") + kUnproven + ")";
}

}  // namespace

Expected<std::unique_ptr<DeviceContext>> DeviceContext::open(std::int32_t index,
                                                             Unproven unproven) noexcept {
  host::OutsideCapture const outside;  // pinned memory would end the capture of a graph
  Facts facts;
  TESSERA_TRY(read_facts(index, facts));
  TESSERA_TRY(check_architecture(index, facts.name, facts.major, facts.minor, unproven));
  DeviceGuard const guard(index, ContextChoice::primary);
  TESSERA_TRY(guard.status());
  std::unique_ptr<DeviceContext> context(new (std::nothrow) DeviceContext);
  if (context == nullptr) {
    return Status::error(StatusCode::out_of_memory, "no memory for a context; end other processes");
  }
  context->index_ = index;
  context->sm_count_ = facts.sm_count;
  context->architecture_ = architecture_of(facts.major);
  void* word = nullptr;
  cudaError_t error =
      cudaHostAlloc(&word, sizeof(std::uint64_t), cudaHostAllocMapped | cudaHostAllocPortable);
  if (error != cudaSuccess) return environment(index, error);
  context->host_error_ = static_cast<std::uint64_t*>(word);
  *context->host_error_ = 0;
  error = cudaHostGetDevicePointer(&word, word, 0);
  if (error != cudaSuccess) return environment(index, error);
  context->gmem_error_ = static_cast<std::uint64_t*>(word);
  return context;
}

DeviceContext::~DeviceContext() {
  if (host_error_ == nullptr) return;
  host::OutsideCapture const outside;
  DeviceGuard const guard(index_, ContextChoice::primary);
  cudaFreeHost(host_error_);
}

Status DeviceContext::take_error() const noexcept {
  auto const word = ErrorWord::unpacked(std::atomic_ref<std::uint64_t>(*host_error_).exchange(0));
  auto const index = static_cast<long long>(word.index), value = static_cast<long long>(word.value);
  switch (word.rule) {
    case BadValue::
        expert_offsets:  // or ends or counts of grouped rows, for which there is no number of their own
      return Status::invalid(
          "expert_offsets (or ends or counts, as grouping says)[%lld]: a value of %lld (-1: "
          "below 0); offsets start at 0, offsets and ends never decrease, counts are not negative, "
          "and all groups lie within the rows of the call; its results are void",
          index, value);
    case BadValue::token_offsets:
      return Status::invalid(
          "token_offsets[%lld]: an offset of %lld (-1: below 0); they start at 0, never decrease "
          "and end at the slots of the call; its results are void",
          index, value);
    case BadValue::topk_counts:
      return Status::invalid(
          "topk_counts[%lld]: a count of %lld (-1: below 0 or NaN; 2147483646: that or more); they "
          "are finite, not negative and add up to at most 2^62; the call took all of them for 0",
          index, value);
    case BadValue::sequence_offsets:
      return Status::invalid(
          "sequence_offsets[%lld]: an offset of %lld (-1: below 0); they start at 0, never "
          "decrease "
          "and end at the tokens of the call; its results are void",
          index, value);
    case BadValue::none:
      break;
  }
  return {};
}

BackendInfo backend_info() {
  BackendInfo info{"cuda", true, false, ""};
  int devices = 0;
  cudaError_t const error = cudaGetDeviceCount(&devices);
  info.detail = kernels_of(built()) + "; ";
  if (error != cudaSuccess || devices == 0) {
    info.detail += error != cudaSuccess ? reason(error) : "this machine has no device";
    return info;
  }
  for (int index = 0; index < devices; ++index) {
    Facts facts;
    Status status = read_facts(index, facts);
    if (status.ok()) status = check_architecture(index, facts.name, facts.major, facts.minor);
    info.available = info.available || status.ok();
    if (index > 0) info.detail += "; ";
    info.detail += status.ok() ? "cuda:" + std::to_string(index) + " " + facts.name + ", " +
                                     std::to_string(facts.sm_count) + " SMs"
                               : std::string(status.text());
  }
  return info;
}

}  // namespace tessera::cuda
