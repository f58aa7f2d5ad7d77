// SPDX-License-Identifier: Apache-2.0
// The GPUs that the kernels run on.
#pragma once

#include <cstdint>

#include "tessera/shape.hpp"
#include "tessera/status.hpp"

namespace tessera::cuda {

/// The GEMMs of a GPU are written for one of these.
enum class Architecture : std::uint8_t { sm_90, sm_100 };
Architecture architecture_of(int major) noexcept;

/// The architectures whose kernels a build has: TESSERA_CUDA_ARCHS.
struct Built {
  bool sm_90, sm_100;
};
Built built() noexcept;

/// Kernels that no GPU has run are refused, or taken by who asks for them.
enum class Unproven : bool { refused, taken };

/// Stands wherever kernels for sm_100a are named.
inline constexpr char kUnproven[] = "compiled and emulated, never run on hardware";

/// Ok for compute capability 9.0, and for 10.0 where unproven kernels are taken, if the build has kernels for it; else
/// environment, with the reason.
Status check_architecture(int device, char const* name, int major, int minor,
                          Unproven unproven = Unproven::refused, Built built = built()) noexcept;

/// Refuses GPUs whose kernels join no others. Errors: unsupported.
Status check_joins_gpus(Architecture architecture) noexcept;
/// Refuses GPUs without kernels for operands that are codes of `precision`: fp8 is served on sm_90a, mxfp8 on sm_100a.
/// Errors: unsupported.
Status check_multiplies_codes(Architecture architecture, Precision precision) noexcept;

}  // namespace tessera::cuda
