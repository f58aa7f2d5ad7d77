# SPDX-License-Identifier: Apache-2.0
"""The machine code of kernels for sm_100a: the instructions that they are written for are there, so many of them, those
of pairs in kernels for pairs alone; no kernel uses local memory, and none runs through its lanes to issue one.

What is looked for is checked first: a listing that lacks one line, or has one more, has to be found wrong.
"""

import argparse
import pathlib
import re
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "tools"))
import ptxas_report  # noqa: E402

ALLOCATES = {"UTCATOMSWS.FIND_AND_SET": 2, "UTCATOMSWS.AND": 1, "UVIRTCOUNT.DEALLOC": 1}
LOADS = {"STTM.x32": 1, "LDTM.x32": 1, "LDTM.16dp256bit.x8": 1}
# Four steps of k, of the first k_tile and of others; two commits; 64 columns of a slab are two loads.
KERNEL = {**ALLOCATES, "UTCHMMA": 4, "LDTM.x32": 2, "UTMASTG": 1}
KERNEL_OF_ONE = {**KERNEL, "UTCBAR": 2, "UTCBAR.MULTICAST": 0}
KERNEL_OF_PAIR = {**KERNEL, "UTCBAR.MULTICAST": 2}
# The warp that draws tiles and the other three have code of their own, for eight rows of a thread.
KERNEL_OF_GATHER = {**KERNEL_OF_ONE, "LDTM.x32": 6, "UTMASTG": 2, "LDGSTS": 16}
ACTIVATION = {"LDTM.x32": 6, "UTMASTG": 2}  # a half of h, then both for a
# dh of each half and a'; h of the halves is loaded in three places.
GRADIENT = {**KERNEL_OF_ONE, "UTMASTG": 3, "UTMALDG.3D": 6, "LDGSTS": 16}
GRADIENT_WITHOUT_GATE = {**GRADIENT, "UTMASTG": 2, "UTMALDG.3D": 3}
# 16 tokens of a thread. fp32 is stored or added, in two parts; to bf16 is added what comes by loads in four places.
WGRAD_FP32 = {**KERNEL_OF_ONE, "UTMASTG": 2, "UTMAREDG": 2, "UTMALDG.4D": 0, "LDGSTS": 32}
WGRAD_ROWS = {**KERNEL_OF_ONE, "UTMALDG.4D": 4, "LDGSTS": 32}
COLUMNS = {"LDTM.x32": 0, "LDTM.16dp256bit.x8": 2, "STSM": 8, "LDSM": 8}
# In pairs the loads of operands are those of pairs.
PAIR_GATHERS = {**KERNEL_OF_PAIR, "ARRIVES.LDGSTSBAR": 2, "UTMALDG.5D": 2}
OF_RIGHT = {"LDGSTS": 32, "UTMALDG.5D": 6}
# MXFP8: both atoms of scales, four steps; eight rows, a word and a line of scales of a thread, in code for the warp
# that draws and for the other three. A tensor that leaves as codes has 16 conversions.
MX = {**ALLOCATES, "UTCQMMA": 4, "UTCHMMA": 0, "UTCCP": 2, "LDGSTS": 20, "ARRIVES.LDGSTSBAR": 2, "UTMALDG.5D": 2}
MX_OF_ONE, MX_OF_PAIR = {**MX, "UTCBAR": 2, "UTCBAR.MULTICAST": 0}, {**MX, "UTCBAR.MULTICAST": 2}
MX_STORE = {"LDTM.x32": 2, "UTMASTG": 1, "F2FP.SATFINITE.E4M3": 0}
MX_ACTIVATION = {"LDTM.x32": 2, "UTMASTG": 0, "F2FP.SATFINITE.E4M3": 48}
MX_GRADIENT = {"LDTM.x32": 1, "UTMASTG": 5, "UTMALDG.3D": 2, "F2FP.SATFINITE.E4M3": 32}
# Kernel, a part of its mangled name -> instructions; .2CTA is left out of both, as `pair` says it.
FORMS = {
    "multiply_bf16ILi1E": {**ALLOCATES, **LOADS, "UTCHMMA": 4, "UTCBAR": 1},
    "multiply_bf16ILi2E": {**ALLOCATES, **LOADS, "UTCHMMA": 4, "UTCBAR.MULTICAST": 1},
    "multiply_mxf8ILi1E": {**ALLOCATES, **LOADS, "UTCQMMA": 4, "UTCCP": 2, "UTCBAR": 1},
    "multiply_mxf8ILi2E": {**ALLOCATES, **LOADS, "UTCQMMA": 4, "UTCCP": 2, "UTCBAR.MULTICAST": 1},
    "load_for_pair": {"UTMALDG": 3, "UTMALDG.2D.MULTICAST": 1, "UTMALDG.2D.GATHER4": 1, "FENCE.VIEW.ASYNC.S": 1},
    "take_launch": {"UGETNEXTWORKID.BROADCAST": 1},
}
GATED, UNGATED = range(5), range(5, 10)  # of ActivationKind; swiglu is the first
MAJORS = range(2)


def expected_kernels() -> dict[str, dict[str, int]]:
    found = {}
    for major in MAJORS:
        def add(name: str, counts: dict[str, int], kind: int | None = None, tail: str = ""):
            of_kind = "" if kind is None else f"NS_14ActivationKindE{kind}EL"
            found[f"{name}IL{of_kind}NS0_4gemm5MajorE{major}{tail}"] = counts

        for op in ("DownProjectionFwdSm100", "UpProjectionDgradSm100"):
            add(op, KERNEL_OF_ONE)
            add(f"{op}Pair", KERNEL_OF_PAIR)
        for kind in (*GATED, *UNGATED):
            gated = kind in GATED
            gradient = GRADIENT if gated else GRADIENT_WITHOUT_GATE
            add("DownProjectionDgradSm100", gradient, kind)
            add("DownProjectionDgradSm100Pair", {**gradient, **PAIR_GATHERS, "UTMASTG": gradient["UTMASTG"]}, kind)
            loads = {} if gated else {"LDTM.x32": 4}
            add("UpProjectionFwdSm100Gathered", {**KERNEL_OF_GATHER, **loads}, kind)
            add("UpProjectionFwdSm100GatheredPair", {**PAIR_GATHERS, **ACTIVATION, "LDGSTS": 16, **loads}, kind)
        add("UpProjectionFwdSm100", {**KERNEL_OF_ONE, **ACTIVATION}, 0)
        add("UpProjectionFwdSm100Pair", {**KERNEL_OF_PAIR, **ACTIVATION}, 0)
        columns = COLUMNS if major == 0 else {}
        add("ProjectionWgradSm100", {**WGRAD_ROWS, **columns}, tail="ELb0E")
        add("ProjectionWgradSm100", WGRAD_FP32, tail="ELb1E")
        add("ProjectionWgradSm100Pair", {**PAIR_GATHERS, **OF_RIGHT, **columns, "UTMALDG.4D": 4}, tail="ELb0E")
        add("ProjectionWgradSm100Pair", {**PAIR_GATHERS, **OF_RIGHT, "UTMASTG": 2, "UTMAREDG": 2}, tail="ELb1E")
    return found


KERNELS = {
    **expected_kernels(),
    "DownProjectionDgradMxfp8ConfigILNS_14ActivationKindE0ELi1E": {**MX_OF_ONE, **MX_GRADIENT},
    "DownProjectionDgradMxfp8ConfigILNS_14ActivationKindE0ELi2E": {**MX_OF_PAIR, **MX_GRADIENT},
    "DownProjectionFwdMxfp8ConfigILi1E": {**MX_OF_ONE, **MX_STORE},
    "DownProjectionFwdMxfp8ConfigILi2E": {**MX_OF_PAIR, **MX_STORE},
    "UpProjectionDgradMxfp8ConfigILi1E": {**MX_OF_ONE, **MX_STORE},
    "UpProjectionDgradMxfp8ConfigILi2E": {**MX_OF_PAIR, **MX_STORE},
    "UpProjectionFwdMxfp8ConfigILNS_14ActivationKindE0ELi1E": {**MX_OF_ONE, **MX_ACTIVATION},
    "UpProjectionFwdMxfp8ConfigILNS_14ActivationKindE0ELi2E": {**MX_OF_PAIR, **MX_ACTIVATION},
}
PAIRS = ("ILi2E", "E0ELi2E", "load_for_pair", "PairI")
OF_PAIRS = ("UTCHMMA", "UTCQMMA", "UTCCP", "UTCBAR", "UTMALDG", "UTCATOMSWS.FIND_AND_SET")
# An epilogue loads for its own CTA.
OWN_LOADS = (("DownProjectionDgradSm100PairI", "UTMALDG.3D"), ("ProjectionWgradSm100PairI", "UTMALDG.4D"),
             ("DownProjectionDgradMxfp8ConfigI", "UTMALDG.3D"))
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\S+\s+)?([A-Z][\w.]*)")


def instructions(sass: str) -> dict[str, list[str]]:
    """By mangled name of the kernel."""
    found, current = {}, []
    for line in sass.splitlines():
        if "Function : " in line:
            current = found.setdefault(line.split("Function : ")[1].strip(), [])
        elif match := INSTRUCTION.match(line):
            current.append(match[1])
    return found


def faults(listing: dict[str, list[str]], expected: dict[str, dict[str, int]]) -> list[str]:
    said = []
    for part, counts in expected.items():
        names = [name for name in listing if part in name]
        if len(names) != 1:
            said.append(f"{part}: {len(names)} kernels of this name, not one")
            continue
        code = listing[names[0]]
        pair = any(mark in part for mark in PAIRS)
        short = [word.replace(".2CTA", "") for word in code]
        for start, count in counts.items():
            there = sum(word.startswith(start) for word in short)
            if there != count:
                said.append(f"{part}: {there} of {start}, not {count}")
        for word in code:
            own = any(part.startswith(kernel) and word == load for kernel, load in OWN_LOADS)
            if word.startswith(OF_PAIRS) and (".2CTA" in word) != pair and not own:
                said.append(f"{part}: {word} in a kernel for {'a pair' if pair else 'one CTA'}")
            if word.startswith(("LDL", "STL")):
                said.append(f"{part}: {word}, local memory")
            if word.startswith("BRA.U.ANY"):
                said.append(f"{part}: {word}, a loop over lanes; issue under elect_one()")
    return said


def check_itself(listing: dict[str, list[str]], expected: dict[str, dict[str, int]]) -> None:
    for part, counts in expected.items():
        name = next(name for name in listing if part in name)
        start = next(iter(counts))
        without = [w for w in listing[name] if not w.replace(".2CTA", "").startswith(start)]
        pair = any(mark in part for mark in PAIRS)
        other = [w.replace(".2CTA", "") if pair else w + (".2CTA" if w == "UTCHMMA" else "") for w in listing[name]]
        wrong = {"lacks " + start: without, "local": [*listing[name], "LDL"], "loops": [*listing[name], "BRA.U.ANY"]}
        if other != listing[name]:
            wrong["pairs"] = other
        for what, code in wrong.items():
            if not faults({**listing, name: code}, {part: counts}):
                sys.exit(f"{part}: nothing is said of a listing that is wrong ({what})")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--forms", required=True, help="object file")
    parser.add_argument("--kernels", required=True, nargs="+", help="object files")
    args = parser.parse_args()
    all_said = []
    for paths, expected in (([args.forms], FORMS), (args.kernels, KERNELS)):
        listing = {}
        for path in paths:
            sass = subprocess.run([ptxas_report.disassembler(), "-sass", path], check=True, capture_output=True,
                                  text=True).stdout
            listing.update(instructions(sass))
        said = faults(listing, expected)
        others = [name for name in listing if not any(part in name for part in expected)]
        said += [f"{name}: {word}" for name in others for word in listing[name]
                 if word.startswith(("LDL", "STL", "BRA.U.ANY"))]
        print("\n".join(said) or f"{len(expected)} of {len(listing)} kernels: ok")
        if not said:
            check_itself(listing, expected)
        all_said += said
    return 1 if all_said else 0


if __name__ == "__main__":
    sys.exit(main())
