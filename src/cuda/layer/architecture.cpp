// SPDX-License-Identifier: Apache-2.0
// The kernels of the library are compiled for sm_90a, whose code runs on compute capability 9.0 alone: neither later
// nor earlier GPUs have all its instructions. GEMMs for sm_100a are compiled and emulated, never run on hardware, and
// in no library yet.
#include "cuda/layer/architecture.hpp"

namespace tessera::cuda {
namespace {

constexpr int kMajor = 9, kMinor = 0;
constexpr int kUnprovenMajor = 10;

char const* reason(int major, int minor) noexcept {
  if (major < kMajor) return "it lacks Hopper's instructions (wgmma, TMA)";
  if (major == kMajor && minor < kMinor) return "it is no Hopper GPU";
  if (major == kUnprovenMajor && minor == kMinor) {
    return "it lacks wgmma, and kernels for it are compiled and emulated, never run on hardware";
  }
  return "it lacks wgmma, which later GPUs gave up; this version has no kernels of theirs";
}

}  // namespace

Architecture architecture_of(int major) noexcept {
  return major == kUnprovenMajor ? Architecture::sm_100 : Architecture::sm_90;
}

Status check_architecture(int device, char const* name, int major, int minor,
                          Unproven unproven) noexcept {
  if (major == kMajor && minor == kMinor) return {};
  if (unproven == Unproven::taken && major == kUnprovenMajor && minor == kMinor) return {};
  return Status::error(
      StatusCode::environment,
      "device cuda:%d: %s has compute capability %d.%d, the kernels are built for %d.%d: %s; use "
      "device cpu",
      device, name, major, minor, kMajor, kMinor, reason(major, minor));
}

}  // namespace tessera::cuda
