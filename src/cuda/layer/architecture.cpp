// SPDX-License-Identifier: Apache-2.0
// The kernels are compiled for sm_90a, whose code runs on compute capability 9.0 alone: neither later nor earlier
// GPUs have all its instructions.
#include "cuda/layer/architecture.hpp"

namespace tessera::cuda {
namespace {

constexpr int kMajor = 9, kMinor = 0;

char const* reason(int major, int minor) noexcept {
  if (major < kMajor) return "it lacks Hopper's instructions (wgmma, TMA)";
  if (major == kMajor && minor < kMinor) return "it is no Hopper GPU";
  return "it lacks wgmma, which later GPUs gave up; this version has no kernels of theirs";
}

}  // namespace

Status check_architecture(int device, char const* name, int major, int minor) noexcept {
  if (major == kMajor && minor == kMinor) return {};
  return Status::error(
      StatusCode::environment,
      "device cuda:%d: %s has compute capability %d.%d, the kernels are built for %d.%d: %s; use "
      "device cpu",
      device, name, major, minor, kMajor, kMinor, reason(major, minor));
}

}  // namespace tessera::cuda
