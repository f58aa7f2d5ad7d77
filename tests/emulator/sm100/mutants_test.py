# SPDX-License-Identifier: Apache-2.0
"""Errors in kernels of sm_100a that emulator_sm100_test has to notice: each in a copy of the sources, compiled and run.

Their words are those of the emulator where it reports a mistake (tensor_memory.hpp), and those of the test where only
a result tells. `--quick` takes one of every kind.
"""

import argparse
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE.parent))
import mutants_test as others  # noqa: E402

SOURCE = "down_projection_fwd_test.cpp"
WORDS, STORE = "cuda/arch/sm100/tcgen05_descriptor.hpp", "cuda/epilogue/store_rows.cuh"
LOOP, ROWS = "cuda/gemm/sm100/mainloop.cuh", "cuda/gemm/sm100/accumulators.cuh"
SLABS, ROLES = "cuda/gemm/sm100/slabs.cuh", "cuda/gemm/sm100/roles.cuh"
WRONG = ", not its bits"
# (name, file, text that stands there once, what stands there instead, a part of what the test then says, tests)
MUTANTS = [
    # descriptors
    ("an operand has the version of Hopper", WORDS, "kVersion = 1;", "kVersion = 0;", "version 0", "*AllRows*"),
    ("leading and stride bytes of rows-major boxes are exchanged", WORDS, ".leading_bytes = 8192};",
     ".leading_bytes = 1024, .stride_bytes = 8192};", WRONG, "*RowsMajor*"),
    ("a rows-major B is said to be K-major", LOOP, "kGemm.b.major == Major::kK ? arch::MmaMajor::kK",
     "true ? arch::MmaMajor::kK", WRONG, "*RowsMajor*"),
    ("a rows-major B has the k step of K-major", LOOP, "kRowsMajor ? arch::kRowsMajorStepBytes",
     "false ? arch::kRowsMajorStepBytes", WRONG, "*RowsMajor*"),
    ("half of the columns are multiplied", LOOP, ".n = kGemm.tile.n,", ".n = kGemm.tile.n / 2,",
     "nothing was written there", "*Turn*"),
    # operands
    ("the last step of k is left out", LOOP, "step < kGemm.tile.k / kStepK", "step < kGemm.tile.k / kStepK - 1", WRONG,
     "*AllRows*"),
    ("A does not step along k", LOOP, "arch::plus(a, s * arch::kKMajorStepBytes)", "arch::plus(a, 0 * s)", WRONG,
     "*AllRows*"),
    # barriers
    ("a stage is freed before it has been read", LOOP, "arch::tcgen05_commit<1>(&smem.empty[state.stage]);",
     "arch::mbarrier_arrive(&smem.empty[state.stage]);", WRONG, "*Turn*"),
    ("a tile is announced a k_tile early", LOOP, "if (k_tile == p.k_tiles - 1)", "if (k_tile == max(p.k_tiles - 2, 0))",
     "is not known to be complete", "*Turn*"),
    ("the accumulator's parity is that of its end", LOOP, "turn.phase ^ 1", "turn.phase", "waits for an mbarrier",
     "*AllRows*"),
    ("an accumulator is free when three warps have loaded it", ROLES, "&smem.acc_empty[i], kEpilogueWarps",
     "&smem.acc_empty[i], kEpilogueWarps - 1", "is not known to be", "*Turn*"),
    ("an accumulator is freed before its last load", STORE, "half == 1 && slab == slabs - 1",
     "half == 0 && slab == slabs - 1", "is not known to be", "*Turn*"),
    ("a warp without rows frees no accumulator", ROLES, "    } else {\n      rows.release();\n    }", "    }",
     "waits for an mbarrier", "*Turn*"),
    ("the accumulators' phase turns with every tile", ROWS, "phase ^= index == 0 ? 1 : 0;", "phase ^= 1;",
     "nothing was written there", "*Turn*"),
    ("a tile is read by one warp more than there are", ROLES, "&smem.work_empty[w], kTileReaders",
     "&smem.work_empty[w], kTileReaders + 1", "waits for an mbarrier", "*Turn*"),
    # order
    ("registers are read before they are loaded", STORE, "rows.loaded();", "", "loads without a wait::ld", "*AllRows*"),
    ("no fence behind the wait for a tile", ROWS, "arch::tcgen05_fence_after();", "", "is not known to be complete",
     "*AllRows*"),
    ("no fence ahead of the arrival for an accumulator", ROWS, "arch::tcgen05_fence_before();", "",
     "is not known to be done", "*Turn*"),
    ("no fence behind the wait for an accumulator", LOOP, "arch::tcgen05_fence_after();  //", "//",
     "is not known to be done", "*Turn*"),
    ("a slab is stored without a proxy fence", SLABS, "arch::fence_proxy_async_shared();", "", "has not fenced",
     "*AllRows*"),
    ("a slab is filled before it has been read", SLABS, "arch::tma_store_wait_read<kWarpSlabs - 1>();", ";", WRONG,
     "*Turn*"),
    # tensor memory
    ("the first step of a tile adds", LOOP, "is_first && step == 0 ? 0 : 1", "1", "adds to what nobody has written",
     "*AllRows*"),
    ("accumulators overlap", LOOP, "turn.index * kGemm.tile.n", "turn.index * 128", "is not known to be", "*Turn*"),
    ("a warp loads the lanes of another one", ROWS, "arch::warp_in_warpgroup() * kWarpSlabRows",
     "(arch::warp_in_warpgroup() ^ 1) * kWarpSlabRows", "by a warp that reaches lanes", "*AllRows*"),
    ("all lanes issue", LOOP, "if (arch::elect_one()) {", "if (true) {", "several lanes of a warp issue", "*AllRows*"),
    ("tensor memory is never freed", ROLES, "if (warp == kMultiplyWarp) arch::tcgen05_free<1>",
     "if (false) arch::tcgen05_free<1>", "the CTA ends with 512 columns", "*AllRows*"),
    ("tensor memory is freed before the last loads", ROLES,
     "  arch::tcgen05_fence_before();\n  __syncthreads();\n  arch::tcgen05_fence_after();\n  if (warp",
     "  arch::tcgen05_fence_before();\n  arch::tcgen05_fence_after();\n  if (warp", "tcgen05.dealloc", "*AllRows*"),
    ("columns are asked for that are no power of two", ROWS, "return columns;", "return columns - 32;",
     "no power of two", "*AllRows*"),
    ("the right to allocate is given up first", ROLES,
     "arch::tcgen05_alloc<1>(&smem.tensor, tensor_columns<kGemm>());\n    arch::tcgen05_relinquish<1>();",
     "arch::tcgen05_relinquish<1>();\n    arch::tcgen05_alloc<1>(&smem.tensor, tensor_columns<kGemm>());",
     "behind relinquish", "*AllRows*"),
    # epilogue
    ("all experts have the bias of the first", STORE, "segment * p_.bias.segment_stride",
     "0 * segment * p_.bias.segment_stride", WRONG, "*Bias*"),
    ("rows are stored one further on", STORE, "p_.ragged_extent + row - tile.end",
     "p_.ragged_extent + row + 1 - tile.end", WRONG, "*Pairs*"),
    ("chunks of a row are not swizzled", SLABS, "(chunk ^ (row & 7)) << 4", "chunk << 4", WRONG, "*AllRows*"),
]
QUICK = ("the last step of k is left out", "no fence behind the wait for a tile")


def outcome(args, mutant):
    """The name, whether the test said what it should, what it said, seconds."""
    start = time.monotonic()
    name, file, old, new, notice, tests = mutant
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        tree = others.mutate(pathlib.Path(args.tree), scratch, file, old, new)
        program = scratch / "test"
        objects = [o for o in args.objects.split(",") if SOURCE not in o]
        folders = (tree, HERE.parent / "include", ROOT, ROOT / "src", ROOT / "include")
        subprocess.run([args.compiler, "-std=c++20", "-O1", "-w", "-fno-strict-aliasing", "-ffp-contract=off",
                        *(f"-I{path}" for path in folders), str(HERE / SOURCE), *objects, *args.libraries.split(","),
                        "-lpthread", "-o", str(program)], check=True)
        try:
            run = subprocess.run([str(program), f"--gtest_filter={tests}"], capture_output=True, text=True,
                                 timeout=others.LIMIT_S, check=False, env={**os.environ, "GTEST_FAIL_FAST": "1"})
        except subprocess.TimeoutExpired:
            return name, False, f"had not ended after {others.LIMIT_S} s\n", time.monotonic() - start
        return name, run.returncode == 1 and notice in run.stdout, run.stdout, time.monotonic() - start


def main():
    parser = argparse.ArgumentParser()
    for flag in ("--compiler", "--tree", "--objects", "--libraries"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--quick", action="store_true", help="one of every kind")
    args = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if not args.quick or mutant[0] in QUICK]
    if args.quick and len(mutants) != len(QUICK):
        sys.exit("a mutant of --quick is not there")
    missed = 0
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for name, noticed, says, seconds in pool.map(lambda mutant: outcome(args, mutant), mutants):
            print(f"{'noticed ' if noticed else 'MISSED  '} {seconds:4.0f} s  {name}", flush=True)
            if not noticed:
                missed += 1
                print(says[-3000:])
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
