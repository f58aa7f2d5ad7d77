#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks which layer includes which, and what must stay in one place.

A file belongs to the layer with the longest matching path; it may include its own layer and those listed. A folder
in the list stands for its own layer alone, without the layers nested in it, unless it ends in /**.
Also: no cycle of includes among files and none among folders, assembly only in src/cuda/arch, environment variables
read by programs and ops only, CUDA headers only below the CUDA folders, kernels that do not include each other.
"""

import pathlib
import re
import sys

# layer -> layers, or single files, that it may include besides itself
LAYERS = {
    "include/tessera": [],
    "src/core": ["include/tessera"],
    # no optimised code
    "src/cpu/reference": ["include/tessera", "src/core/router_groups.hpp", "src/core/philox.hpp"],
    "src/cpu/parallel": ["include/tessera", "src/core"],
    "src/ops": [
        "include/tessera", "src/core", "src/cpu/parallel", "src/cuda/layer/backend.hpp", "src/expert_parallel",
        "src/expert_parallel/plan", "src/expert_parallel/transport", "src/expert_parallel/hosts",
    ],
    "src/capi": ["include/tessera"],
    "src/device": ["include/tessera"],
    "src/verify": [
        "include/tessera", "src/device", "src/cpu/reference", "src/core/router_groups.hpp",
        "src/core/philox.hpp",
    ],
    "src/cuda/arch": [],
    "src/cuda/arch/sm90": ["src/cuda/arch"],
    "src/cuda/arch/sm100": ["src/cuda/arch"],
    "src/cuda/warp": ["src/cuda/arch"],
    "src/cuda/gemm": ["src/cuda/arch", "src/cuda/warp"],
    "src/cuda/gemm/produce": ["src/cuda/arch", "src/cuda/warp", "src/cuda/gemm"],
    "src/cuda/gemm/epilogue": ["src/cuda/gemm"],
    "src/cuda/gemm/sm100": [
        "src/cuda/arch", "src/cuda/arch/sm100", "src/cuda/warp", "src/cuda/gemm", "src/cuda/gemm/epilogue",
        "src/cuda/gemm/produce",
    ],
    "src/cuda/gemm/sm90": [
        "src/cuda/arch", "src/cuda/arch/sm90", "src/cuda/warp", "src/cuda/gemm", "src/cuda/gemm/epilogue",
        "src/cuda/gemm/produce",
    ],
    "src/cuda/epilogue": [
        "src/cuda/arch", "src/cuda/warp", "src/cuda/gemm", "include/tessera/shape.hpp", "src/core/fp8.hpp",
    ],
    "src/cuda/host": ["include/tessera", "src/core", "src/cuda/gemm/config.hpp", "src/cuda/gemm/params.hpp"],
    "src/cuda/router": ["src/cuda/arch", "src/cuda/warp", "src/cuda/host", "src/core"],
    "src/cuda/mxfp8": [
        "src/cuda/gemm", "src/cuda/gemm/sm100", "src/cuda/epilogue", "src/cuda/host",
    ],
    "src/cuda/layer": [
        "include/tessera", "src/core", "src/cuda/host", "src/cuda/tuning/precision.hpp", "src/cuda/tuning/sm100.hpp",
    ],
    "src/cuda/tuning": ["src/cuda/gemm/config.hpp", "include/tessera/shape.hpp"],
    "src/cuda/plain": ["src/cuda/host", "src/core"],
    "src/cuda/kernels": [
        "src/cuda/arch", "src/cuda/warp", "src/cuda/gemm", "src/cuda/gemm/sm90", "src/cuda/gemm/sm100",
        "src/cuda/epilogue", "src/cuda/router", "src/cuda/mxfp8", "src/cuda/host", "src/cuda/tuning", "src/core",
    ],
    "src/cuda/instances": ["src/cuda/host", "src/cuda/kernels", "src/cuda/tuning"],
    "src/expert_parallel": [
        "include/tessera", "src/core", "src/expert_parallel/plan", "src/expert_parallel/transport",
        "src/expert_parallel/fused/forward.hpp", "src/expert_parallel/hosts", "src/cuda/host/error_text.hpp",
    ],
    "src/expert_parallel/hosts": [
        "include/tessera", "src/core", "src/expert_parallel/transport", "src/cuda/arch",
        "src/cuda/host/error_text.hpp", "src/cuda/host/outside_capture.hpp",
    ],
    "src/expert_parallel/plan": ["include/tessera", "src/core"],
    "src/expert_parallel/transport": [
        "include/tessera", "src/core", "src/expert_parallel/plan", "src/cuda/arch",
        "src/cuda/host/context_choice.hpp", "src/cuda/host/current_context.hpp", "src/cuda/host/error_text.hpp",
    ],
    "src/expert_parallel/exchange": [
        "include/tessera", "src/core", "src/expert_parallel/plan", "src/expert_parallel/transport", "src/cuda/arch",
        "src/cuda/warp",
    ],
    "src/expert_parallel/unfused": [
        "src/expert_parallel/plan", "src/expert_parallel/transport", "src/expert_parallel/exchange", "src/cuda/arch",
        "src/cuda/host/launch.hpp",
    ],
    "src/expert_parallel/fused": [
        "include/tessera", "src/expert_parallel/plan", "src/expert_parallel/transport",
        "src/expert_parallel/exchange", "src/cuda/arch", "src/cuda/warp", "src/cuda/gemm", "src/cuda/gemm/produce",
        "src/cuda/gemm/sm90", "src/cuda/epilogue", "src/cuda/host",
    ],
    "src/expert_parallel/instances": ["src/expert_parallel/fused"],
    "lm": ["include/tessera"],
    "huggingface": ["include/tessera", "lm"],
    "cli": [
        "include/tessera", "src/verify", "src/device", "src/core/interleaved_columns.hpp", "lm", "huggingface",
    ],
    "bench": [
        "include/tessera", "src/core", "src/cpu/parallel", "src/cuda/**", "src/device", "src/expert_parallel/**",
    ],
    "examples": ["include/tessera"],
    "tests": ["**"],  # anything
}
MAY_READ_ENVIRONMENT = ("src/ops", "lm", "cli", "bench", "tests")
MAY_INCLUDE_CUDA = (
    "src/cuda", "src/device/cuda.cu", "src/expert_parallel/transport/device_calls.cpp",
    "src/expert_parallel/session.cpp", "src/expert_parallel/exchange", "src/expert_parallel/fused",
    "src/expert_parallel/hosts", "src/expert_parallel/unfused", "bench/cuda", "bench/expert_parallel",
    "examples/cpp", "tests/cuda", "tests/emulator", "tests/example",
)

SUFFIXES = {".hpp", ".cpp", ".h", ".c", ".cuh", ".cu"}
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.MULTILINE)
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def below(path: str, folders) -> bool:
    return any(not f or path == f or path.startswith(f + "/") for f in folders)


def layer_of(path: str) -> str | None:
    found = [layer for layer in LAYERS if below(path, [layer])]
    return max(found, key=len) if found else None


def resolve(root: pathlib.Path, file: pathlib.Path, name: str) -> str | None:
    """The repository path that `#include "name"` in `file` means; None if it is no file of ours."""
    for folder in (file.parent, root / "src", root / "include", root):
        target = (folder / name).resolve()
        if target.is_file() and target.is_relative_to(root):
            return target.relative_to(root).as_posix()
    return None


def may_include(layer: str, target: str) -> bool:
    """Whether a file of the layer may include the file target."""
    if layer_of(target) == layer:
        return True
    for entry in LAYERS[layer]:
        if entry in (target, layer_of(target), "**") or entry.endswith("/**") and below(target, [entry[:-3]]):
            return True
    return False


def cycles(graph: dict[str, list[str]]) -> list[list[str]]:
    """One cycle for each file that a walk along the includes meets again on its own path."""
    found, done = [], set()

    def walk(path, trail):
        if path in trail:
            found.append([*trail[trail.index(path):], path])
        elif path not in done:
            for target in graph.get(path, ()):
                walk(target, [*trail, path])
            done.add(path)

    for path in sorted(graph):
        walk(path, [])
    return found


def folders_of(graph: dict[str, list[str]]) -> dict[str, list[str]]:
    """Which folder includes files of which other ones."""
    result: dict[str, set[str]] = {}
    for path, targets in graph.items():
        folder = path.rpartition("/")[0]
        result.setdefault(folder, set()).update(target.rpartition("/")[0] for target in targets)
    return {folder: sorted(others - {folder}) for folder, others in result.items()}


def check_file(root: pathlib.Path, file: pathlib.Path, graph: dict[str, list[str]]) -> list[str]:
    """Complaints about one file; adds the repository's files that it includes to the graph."""
    path = file.relative_to(root).as_posix()
    layer = layer_of(path)
    if layer is None:
        return [f"{path}: belongs to no layer of tools/check_layers.py"]
    text = file.read_text(encoding="utf-8")
    found = []
    for quote, name in INCLUDE.findall(text):
        target = resolve(root, file, name)
        if target is None:
            if quote == '"':
                found.append(f'{path}: "{name}" is no file of the repository; use <> for others')
            if re.match(r"cuda|cublas|nv", name) and not below(path, MAY_INCLUDE_CUDA):
                found.append(f"{path}: CUDA header <{name}> outside {', '.join(MAY_INCLUDE_CUDA)}")
            continue
        graph.setdefault(path, []).append(target)
        if not may_include(layer, target):
            found.append(f"{path}: {layer} may not include {target}")
        if layer == "src/cuda/kernels" and below(target, [layer]):
            found.append(f"{path}: kernels do not include each other ({target})")
    code = COMMENT_OR_STRING.sub(" ", text)
    if re.search(r"\basm\b", code) and not below(path, ["src/cuda/arch", "tests/emulator/fiber.cpp"]):
        found.append(f"{path}: asm outside src/cuda/arch")
    if re.search(r"\b(secure_)?getenv\b", code) and not below(path, MAY_READ_ENVIRONMENT):
        found.append(f"{path}: reads the environment below ops")
    return found


def check_tree(root: pathlib.Path) -> list[str]:
    found, graph = [], {}
    for top in sorted({layer.split("/")[0] for layer in LAYERS}):
        for file in sorted((root / top).rglob("*")):
            if file.suffix in SUFFIXES:
                found += check_file(root, file, graph)
    for each in (graph, folders_of(graph)):
        found += [f"{cycle[0]}: includes itself through {' -> '.join(cycle[1:])}" for cycle in cycles(each)]
    return found


def main() -> int:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent)
    found = check_tree(root.resolve())
    print("\n".join(found) or "layers: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
