# SPDX-License-Identifier: Apache-2.0
"""Errors in kernels of the router that emulator_routing_test has to notice: each in a copy of the sources, compiled and
run. `--quick` takes two."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import mutant_runner  # noqa: E402

ROUNDED = "cuda/kernels/router_dlogits_rounded.cuh"
METADATA = "cuda/kernels/metadata.cuh"
ROW, PLACE, WORD = "dl[at]", "  listed\n", "words["
# (name, file, text that stands there once, what stands there instead, a part of what the test then says)
MUTANTS = [
    ("rows of a token with a dropped member have their dlogits", ROUNDED,
     "= listed ? 0.0f : value;", "= value;", ROW),
    ("rows of a token with an added expert have their dlogits", ROUNDED,
     "listed || slot.id < 0 ? 0.0f", "slot.id < 0 ? 0.0f", ROW),
    ("a member is in the row of the slot that it is", ROUNDED,
     "__shfl_sync(arch::kAllLanes, row, max(place, 0), kLanes)", "__shfl_sync(arch::kAllLanes, row, k, kLanes)", ROW),
    ("a member that was dropped has the ds of the first slot", ROUNDED,
     "if (!kept) own.ds = 0;", "", "exceeds 2e-6"),
    ("an expert that was added is taken for a member", ROUNDED,
     "odd != 0 || __popc(named) != __popc(members)", "odd != 0", "exceeds 2e-6"),
    ("a token that lost a member is not listed", ROUNDED,
     "bool const listed = of_token(own.routed && !kept) != 0;", "bool const listed = false;", "is_listed[t]"),
    ("the list begins at its second place", ROUNDED,
     "place, 0) + __popc(", "place, 0) + 1 + __popc(", PLACE),
    ("tokens of a warp have one place", ROUNDED,
     "+ __popc(all & ((1u << lane) - 1))", "+ 0", PLACE),
    ("the first CTA that comes says how many are listed", ROUNDED,
     "before >> 32 == gridDim.x - 1", "before >> 32 == 0", "offsets[1]"),
    ("places are drawn on from the last launch's", ROUNDED,
     "*listed.gmem_counter = 0;", "", "counter"),
    ("words of the last CTA that clears are left", METADATA,
     "1 + clearing_ctas(args.cleared)", "clearing_ctas(args.cleared)", WORD),
    ("every CTA that clears has the first words", METADATA,
     "clear_share(p.cleared, static_cast<int>(blockIdx.x) - 1)", "clear_share(p.cleared, 0)", WORD),
    ("CTAs with slots clear what the first of them would", METADATA,
     "static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)", "0, static_cast<int>(gridDim.x)", WORD),
    ("warps that share tokens leave out those of the last one", ROUNDED,
     "of_warp < kWarps; ++of_warp", "of_warp < kWarps - 1; ++of_warp", "exceeds 2e-6"),
]
QUICK = ("rows of a token with a dropped member have their dlogits", "the list begins at its second place")


def how(mutant, is_quick):
    """What is compiled for a mutant, the tests that are run, and the level of optimisation."""
    if mutant[1] == METADATA:
        return "metadata_test.cpp", "MetadataByDefinition.*", "-O1"
    return "router_dlogits_test.cpp", "RoundedDlogits*", "-O1"


if __name__ == "__main__":
    sys.exit(mutant_runner.main(MUTANTS, QUICK, how))
