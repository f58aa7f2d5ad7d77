#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What ptxas gives every kernel of the library: registers, shared memory, stack, spills; on sm_100a the columns of
tensor memory too.

Has build-cuda make the objects that are not there or not new enough, and reads what ptxas said of each, which the build
keeps beside it (cmake/keep_ptxas.sh). Writes a file of bench/resources for each architecture, or with --check compares
with it: a change must be committed to be accepted.

Fails where a kernel's wgmmas are serialised, or their warps may be divided: then every lane counts k_tiles and stages
by itself, and what wgmma needs of it is moved to uniform registers, which takes twice the instructions of a k loop
(docs/notebook/2026-11-23-converged-warps.md). Fails too where a kernel uses local memory, where one takes more tensor
memory than there is or has not said how much, and where one has no code for an architecture that it is compiled for.
"""

import argparse
import concurrent.futures
import difflib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent.resolve()
RESOURCES = ROOT / "bench" / "resources"
ARCHITECTURES = ("sm_90a", "sm_100a")
TENSOR_COLUMNS = 512
FOLDERS = (
    "src/cuda/instances/", "src/cuda/layer/", "src/cuda/plain/", "src/expert_parallel/instances/",
    "src/expert_parallel/fused/", "src/expert_parallel/unfused/", "src/expert_parallel/hosts/",
)


def objects(build: pathlib.Path, architecture: str = "sm_90a") -> list[tuple[str, pathlib.Path]]:
    """(source, object) of those with code for an architecture, from the commands that compile them."""
    listed = build / "compile_commands.json"
    if not listed.is_file():
        sys.exit(f"{listed}: no such file; configure first: cmake --preset cuda")
    result = []
    for entry in json.loads(listed.read_text(encoding="utf-8")):
        file = pathlib.Path(entry["file"])
        file = file.parent.resolve() / file.name  # what links to a source is compiled for something else
        path = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else ""
        if not path.startswith(FOLDERS) or not path.endswith(".cu") or f"[{architecture}]" not in entry["command"]:
            continue
        words = shlex.split(entry["command"])
        result.append((path, build / words[words.index("-o") + 1]))
    return sorted(result)


def make(build: pathlib.Path, jobs: int, outputs: list[pathlib.Path]) -> None:
    targets = [str(output.relative_to(build)) for output in outputs]
    done = subprocess.run(["cmake", "--build", str(build), "--parallel", str(jobs), "--target", *targets],
                          check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{build}: {done.stdout}{done.stderr}")


def said(output: pathlib.Path) -> str:
    """What ptxas said when it made an object."""
    kept = output.with_name(f"{output.name}.ptxas")
    if not kept.is_file():
        sys.exit(f"{kept}: no such file; remove the object beside it, so that the build keeps what ptxas says")
    return kept.read_text(encoding="utf-8")


def disassembler() -> str:
    installed = (ROOT / ".venv").glob("lib/*/site-packages/nvidia/*/bin/cuobjdump")
    found = shutil.which("cuobjdump") or next(map(str, installed), None)
    if found is None:
        sys.exit("no cuobjdump: tools/bootstrap.sh lint installs it")
    return found


def divided(sass: str) -> dict[str, bool]:
    """By mangled name the kernels that have wgmmas, and whether ptxas brings warps together right before one: it does
    where it cannot tell that they are."""
    names, name, since = {}, "", 0
    for line in sass.splitlines():
        if "Function : " in line:
            name, since = line.split("Function : ")[1].strip(), 1000
        elif not re.match(r"\s*/\*[0-9a-f]{4,}\*/", line):
            continue
        elif "WARPSYNC" in line:
            since = 0
        else:
            if re.search(r"\b[HQ]GMMA\b", line):
                names[name] = names.get(name, False) or since < 30
            since += 1
    return names


def code(sass: str) -> dict[str, list[str]]:
    """By mangled name a kernel's instructions with their operands, without predicates."""
    names, current = {}, []
    for line in sass.splitlines():
        if "Function : " in line:
            current = names.setdefault(line.split("Function : ")[1].strip(), [])
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\S+\s+)?([A-Z][^;]*)", line):
            current.append(match[1].strip())
    return names


def tensor_columns(instructions: list[str]) -> int | None:
    """Columns of tensor memory that a kernel allocates, None where it allocates none. Errors: ValueError where the
    operand of the instruction, which counts units of 32, is no constant."""
    registers, columns = {}, None
    for instruction in instructions:
        word, _, operands = instruction.partition(" ")
        if word == "UMOV":
            register, _, value = operands.partition(", ")
            registers[register] = int(value, 16) if value.startswith("0x") else None
        elif word.startswith("UTCATOMSWS") and "FIND_AND_SET" in word:
            units = registers.get(operands.split(", ")[-1])
            if units is None or (columns is not None and columns != 32 * units):
                raise ValueError(f"{instruction}: not so many units as a UMOV before it says")
            columns = 32 * units
    return columns


def keeps_registers(path: str, architecture: str) -> bool:
    """Whether kernels of a source may use no local memory: plain twins may, and neutral kernels on sm_100a, where
    those for few tokens keep 48 bytes beside their loops."""
    return "/instances/" in path and (architecture == "sm_90a" or "/sm100/" in path)


def fault_of(name: str, instructions: list[str], registers_alone: bool) -> str:
    """What is wrong with a kernel's code, or nothing."""
    if all(re.match(r"(NOP|EXIT|BRA|LDC|MOV R1)\b", instruction) for instruction in instructions):
        return (f"{name}: it has no code for this architecture. src/cuda/CMakeLists.txt says which sources are "
                "compiled for which")
    local = next((i for i in instructions if i.startswith(("LDL", "STL"))), None)
    if local and registers_alone:
        return f"{name}: {local}, local memory: a fast kernel keeps what it has in registers"
    try:
        columns = tensor_columns(instructions) or 0
    except ValueError as error:
        return f"{name}: tensor memory, {error}"
    if columns > TENSOR_COLUMNS:
        return f"{name}: {columns} columns of tensor memory; there are {TENSOR_COLUMNS}"
    return ""


def without_parameters(signature: str) -> str:
    """A function's name: what stands before the parenthesis that the last one closes."""
    depth = 0
    for at in range(len(signature) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(signature[at], 0)
        if depth == 0:
            return signature[:at] if signature.endswith(")") else signature
    return signature


def demangle(names: list[str]) -> list[str]:
    result = subprocess.run(["c++filt"], input="\n".join(names), check=True, capture_output=True, text=True)
    short = []
    for name in result.stdout.splitlines():
        name = re.sub(r"\(anonymous namespace\)::|_GLOBAL__N_\w+::|tessera::(cuda|expert_parallel)::", "", name)
        short.append(without_parameters(re.sub(r"^void ", "", name)))
    return short


def kernels(output: str, architecture: str = "sm_90a") -> list[tuple[str, str]]:
    """(mangled name, resources) of each kernel that ptxas's verbose output has for an architecture."""
    result = []
    for block in re.split(r"ptxas info\s*: Compiling entry function ", output)[1:]:
        name, compiled_for = re.match(r"'(\w+)' for '(\w+)'", block).groups()
        if compiled_for != architecture:
            continue
        stack, stores, loads = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block).groups()
        registers = re.search(r"Used (\d+) registers", block)[1]
        shared = re.search(r"(\d+) bytes smem", block)
        result.append((name, f"{registers:>3} registers  {shared[1] if shared else 0:>6} bytes static shared  "
                             f"{stack:>3} stack  {int(stores) + int(loads):>3} spilled"))
    return result


def refuse_serialised(path: str, text: str) -> None:
    """ptxas serialises wgmmas that it cannot prove safe, and only informs: -Werror lets that pass."""
    if serialised := re.search(r".*\(C75\d\d\).*", text):
        sys.exit(f"{path}: {serialised[0]}")


def chosen(found: list[tuple[str, pathlib.Path]], only: str) -> list[tuple[str, pathlib.Path]]:
    """Those of the sources whose path has `only` in it."""
    some = [(path, output) for path, output in found if only in path]
    if not some:
        sys.exit(f"--only {only}: no CUDA source of the library has that in its path; if it is new, configure again")
    return some


def report(build: pathlib.Path, jobs: int, architecture: str, only: str = "") -> str:
    def read(entry):
        path, output = entry
        text = said(output)
        refuse_serialised(path, text)
        sass = subprocess.run([dumper, "-sass", "-arch", architecture, str(output)], check=False, capture_output=True,
                              text=True).stdout
        multiplies = divided(sass)
        for name in demangle([name for name, is_divided in multiplies.items() if is_divided]):
            sys.exit(f"{path}: {name}: its warps may be divided at wgmmas. Behind a branch of some lanes __syncwarp() "
                     "is missing, or a lane loops by itself")
        listing, entries = code(sass), []
        for name, resources in kernels(text, architecture):
            registers_alone = keeps_registers(path, architecture)
            if fault := fault_of(demangle([name])[0], listing.get(name, []), registers_alone):
                sys.exit(f"{path}: {architecture}: {fault}")
            if not resources.endswith(" 0 spilled"):
                sys.exit(f"{path}: {architecture}: {demangle([name])[0]}: {resources}; no kernel may spill")
            if architecture == "sm_100a":
                resources += f"  {tensor_columns(listing[name]) or 0:>3} tensor columns"
            entries.append((name, resources))
        return path, entries, len(multiplies)

    dumper = disassembler()
    sources = chosen(objects(build, architecture), only)
    make(build, jobs, [output for _, output in sources])
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(read, sources))
    if architecture == "sm_90a" and not only and sum(with_wgmmas for _, _, with_wgmmas in found) == 0:
        sys.exit("no wgmma in any kernel, as cuobjdump writes them")
    lines = [f"# Written by tools/ptxas_report.py; nvcc -gencode=arch=compute_{architecture[3:]},code={architecture}"]
    if architecture == "sm_100a":
        lines.append("# Compiled and emulated, never run on hardware.")
    for path, entries, _ in found:
        if not entries:
            continue
        names = demangle([name for name, _ in entries])
        lines.append(f"\n{path}")
        lines += sorted(f"  {resources}  {name}" for name, (_, resources) in zip(names, entries))
    return "\n".join(lines) + "\n"


def compare(architecture: str, text: str) -> bool:
    """Whether what is committed says the same; prints the difference."""
    path = RESOURCES / f"{architecture}.txt"
    committed = path.read_text(encoding="utf-8") if path.is_file() else ""
    if committed == text:
        print(f"ptxas resources, {architecture}: as committed")
        return True
    name = str(path.relative_to(ROOT))
    sys.stdout.writelines(difflib.unified_diff(committed.splitlines(True), text.splitlines(True), name, "now"))
    print("ptxas resources changed: judge the difference, then run tools/ptxas_report.py and commit")
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build-cuda")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--only", metavar="NAME", default="",
                        help="print what sources with NAME in their path have; write and compare nothing")
    parser.add_argument("--arch", choices=ARCHITECTURES, help="of one architecture (default: those of the build)")
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    same = True
    for architecture in [arguments.arch] if arguments.arch else ARCHITECTURES:
        sources = objects(build, architecture)
        if not arguments.arch and not any(arguments.only in path for path, _ in sources):
            print(f"{architecture}: no such kernels in this build")
            continue
        text = report(build, arguments.jobs, architecture, arguments.only)
        if arguments.only:
            print(text, end="")
        elif arguments.check:
            same = compare(architecture, text) and same
        else:
            RESOURCES.mkdir(parents=True, exist_ok=True)
            path = RESOURCES / f"{architecture}.txt"
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
