// SPDX-License-Identifier: Apache-2.0
// Code for sm_90a runs on compute capability 9.0 alone and code for sm_100a on 10.0 alone: neither later nor earlier
// GPUs have all its instructions. Kernels for sm_100a have been emulated, and no GPU has run them.
#include "cuda/layer/architecture.hpp"

namespace tessera::cuda {
namespace {

constexpr int kHopper = 9, kBlackwell = 10;  // compute capabilities 9.0 and 10.0

char const* capabilities(Built built) noexcept {
  return built.sm_90 && built.sm_100 ? "9.0 and 10.0" : built.sm_90 ? "9.0" : "10.0";
}

char const* reason(int major, int minor) noexcept {
  if (major < kHopper) return "it lacks Hopper's instructions (wgmma, TMA)";
  if (minor == 0 && (major == kHopper || major == kBlackwell)) {
    return "configure with it among TESSERA_CUDA_ARCHS ('90a;100a' is both)";
  }
  if (major == kHopper) return "it is no Hopper GPU";
  return "it lacks wgmma, which later GPUs gave up, and has other tensor cores than 10.0";
}

}  // namespace

Architecture architecture_of(int major) noexcept {
  return major == kBlackwell ? Architecture::sm_100 : Architecture::sm_90;
}

Built built() noexcept {
  Built out{true, true};
#if defined(TESSERA_WITHOUT_SM90)
  out.sm_90 = false;
#endif
#if defined(TESSERA_WITHOUT_SM100)
  out.sm_100 = false;
#endif
  return out;
}

Status check_architecture(int device, char const* name, int major, int minor, Unproven unproven,
                          Built built) noexcept {
  if (major == kHopper && minor == 0 && built.sm_90) return {};
  bool const has_unproven = major == kBlackwell && minor == 0 && built.sm_100;
  if (has_unproven && unproven == Unproven::taken) return {};
  if (has_unproven) {
    return Status::error(
        StatusCode::environment,
        "device cuda:%d: %s has compute capability 10.0, whose kernels are %s; ask for unproven "
        "kernels (unproven_kernels of a context, --unproven-kernels, "
        "tessera.use_unproven_kernels()), or use device cpu",
        device, name, kUnproven);
  }
  return Status::error(
      StatusCode::environment,
      "device cuda:%d: %s has compute capability %d.%d, the kernels are built for %s: %s; use "
      "device cpu",
      device, name, major, minor, capabilities(built), reason(major, minor));
}

Status check_joins_gpus(Architecture architecture) noexcept {
  if (architecture == Architecture::sm_90) return {};
  return Status::unsupported(
      "experts over several GPUs: there are kernels for sm_90a alone, and this GPU is sm_100a; use "
      "a layer on one GPU");
}

Status check_multiplies_codes(Architecture architecture, Precision precision) noexcept {
  bool const is_mxfp8 = precision == Precision::mxfp8,
             has_mxfp8 = architecture == Architecture::sm_100;
  if (is_mxfp8 == has_mxfp8) return {};
  return is_mxfp8
             ? Status::unsupported(
                   "precision=mxfp8: Hopper's tensor cores have no blocks of 32; use fp8, native "
                   "or device cpu")
             : Status::unsupported(
                   "precision=fp8 on sm_100a: its kernels multiply codes in blocks of 32 alone; "
                   "use precision mxfp8 or native");
}

}  // namespace tessera::cuda
