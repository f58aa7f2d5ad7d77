#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that what the Markdown files point at exists: relative links, their #anchors, and code paths. And that each
kernel stands in the map of docs/kernels/README.md.

A code path is text in backticks that looks like a path of this repository: its first part is a folder or
file at the top (`src/core`, `tests/*/CMakeLists.txt`; wildcards and {a,b} are fine). Paths with <parts> to
fill in are not checked, nor what a build makes (build/, runs/, .venv/).
"""

import itertools
import pathlib
import re
import subprocess
import sys

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
MADE_BY_BUILDS = re.compile(r"^(build(-\w+)?|runs|\.venv|dist)(/|$)")


def anchors(text: str) -> set[str]:
    """GitHub's anchors of the headings."""
    result = set()
    for heading in re.findall(r"^#+ +(.*?) *#*$", FENCE.sub("", text), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        for number in itertools.count():
            candidate = slug if number == 0 else f"{slug}-{number}"
            if candidate not in result:
                result.add(candidate)
                break
    return result


def expand(pattern: str) -> list[str]:
    """`a/{b,c}.x` -> a/b.x, a/c.x"""
    match = re.search(r"\{([^}]*)\}", pattern)
    if not match:
        return [pattern]
    parts = match[1].split(",")
    return [p for part in parts for p in expand(pattern[: match.start()] + part + pattern[match.end() :])]


def exists(root: pathlib.Path, pattern: str) -> bool:
    return all(any(root.glob(path.rstrip("/"))) for path in expand(pattern))


def check_link(root: pathlib.Path, file: pathlib.Path, target: str) -> str | None:
    if re.match(r"[a-z]+:", target):
        return None
    path, _, anchor = target.partition("#")
    linked = (file.parent / path).resolve() if path else file
    if not linked.is_relative_to(root) or not linked.exists():
        return f"link to {target}: no such file"
    if anchor and linked.suffix == ".md" and anchor not in anchors(linked.read_text(encoding="utf-8")):
        return f"link to {target}: no such heading"
    return None


def check_code(root: pathlib.Path, text: str, tops: set[str]) -> str | None:
    path = text.split(" ")[0].split(":")[0].rstrip(".,")
    if "/" not in path or "<" in path or MADE_BY_BUILDS.match(path):
        return None
    if not re.fullmatch(r"[\w.*{},/-]+", path) or path.split("/")[0] not in tops:
        return None
    return None if exists(root, path) else f"`{text}`: no such path"


def check_map(root: pathlib.Path) -> list[str]:
    """The kernels that a row of the map should have, and none has."""
    page = root / "docs/kernels/README.md"
    rows = "".join(re.findall(r"^\| (.*?) \|", page.read_text(encoding="utf-8"), re.MULTILINE)) if page.exists() else ""
    return [f"docs/kernels/README.md: no row has `{kernel.stem}`"
            for kernel in sorted(root.glob("src/cuda/kernels/*.cuh")) if f"`{kernel.stem}`" not in rows]


def check_tree(root: pathlib.Path, files: list[pathlib.Path]) -> list[str]:
    tops = {entry.name for entry in root.iterdir()} - {".git"}
    found = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        prose = FENCE.sub("", text)
        complaints = [check_link(root, file, a or b) for a, b in LINK.findall(prose)]
        complaints += [check_code(root, code, tops) for code in CODE.findall(prose)]
        found += [f"{file.relative_to(root)}: {complaint}" for complaint in complaints if complaint]
    return found


def main() -> int:
    root = pathlib.Path(__file__).parent.parent.resolve()
    listed = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=root, check=True, capture_output=True)
    files = [root / name for name in listed.stdout.decode().split("\0") if name and (root / name).is_file()]
    found = check_tree(root, files) + check_map(root)
    print("\n".join(found) or f"links: ok ({len(files)} documents)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
