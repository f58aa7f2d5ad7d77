// SPDX-License-Identifier: Apache-2.0
// The rules by which a layer in FP8 or MXFP8 is right.
#pragma once

#include "cpu/reference/low_precision.hpp"
#include "verify/tensors.hpp"

namespace tessera::verify {

/// Returns what the reference makes of the operands of a layer that quantises them.
reference::Recipe recipe_of(MoeDesc const& desc);

/// 20 log10(|ref| / |ref - out|), dB; 999 where they are equal.
double sqnr_db(std::vector<double> const& ref, std::vector<float> const& out);

/// The recipe's results in fp64, which take the place of the naive path. A second sample where the activation has kinks
/// away from 0: there a code that rounding flips turns a gradient on or off, so in this sample every saved h within a
/// step of e4m3 of a kink lies on its other side.
std::vector<Tensors> recipe_samples(LayerData const& data, reference::Inputs const& inputs);

/// Results of a recipe in fp64.
Tensors recipe_sample(LayerData const& data, reference::Inputs const& inputs,
                      reference::Recipe const& recipe);

/// The recipe's results with the other code for every h and dh near a tie: six samples, for ties above and below, up
/// to three distances. A backend's sums flip a few of these codes. Where an expert has one or two rows, 16 rows of its
/// gradient are as many different numbers, and if the recipe's errors in the largest happen to cancel, one such code
/// is an error of more than twice the recipe's.
std::vector<Tensors> flipped_samples(LayerData const& data, reference::Inputs const& inputs);

/// Tensors of `out` that have 0.3 dB less than the recipe on the same data, the worst of its samples; a line each.
/// Codes that roundings flip cost hundredths. Tensors of less than 4096 elements, and those without any error in the
/// recipe, are left out. ds and what the router makes of it are `slots` numbers, however large the tensor: a few large
/// ones decide, so they may lose 1 dB, and where there are less than 74 of them 0.3 + 6 / sqrt(slots), three standard
/// deviations of flipped codes, whose noise is a fifth of that of quantising.
std::vector<std::string> lost_db(ReferenceTensors const& ref, std::vector<Tensors> const& recipe,
                                 Tensors const& out, std::int64_t slots);

}  // namespace tessera::verify
