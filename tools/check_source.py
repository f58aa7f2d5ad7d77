#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What no formatter checks: the licence line, comment width, whitespace, unfinished work, large files, private
members that a file of the Python package takes from another one, lessons that a comment cites and docs/lessons.md
does not have, windows of ranks that are reached past the transport, fragments of accumulators outside gemm/sm90,
comments that begin without a subject or name a file that is gone, and mutants whose text no longer stands in the
source once."""

import ast
import itertools
import pathlib
import re
import runpy
import subprocess
import sys

CODE = {".hpp", ".cpp", ".h", ".c", ".cuh", ".cu"}
NEEDS_LICENCE = CODE | {".py", ".sh", ".cmake"}
LICENCE = "SPDX-License-Identifier: Apache-2.0"
MAX_COLUMNS = 120  # clang-format keeps code to 100; a formula or a timeline in a comment may need more
MAX_LINES = 600
MAX_BYTES = 1 << 20
# Addresses of windows are an array of the transport. Kernels and their headers reach a window by Peer and OwnWindow,
# which is where ranks without an address come in; host code (.cpp) hands addresses on.
RAW_WINDOW = re.compile(r"\bwindows_?\s*\[")
REACH_WINDOWS = {".cuh", ".cu", ".hpp"}
TRANSPORT = "src/expert_parallel/transport/"
# Which thread has which sum, the core of an architecture alone knows: all others see rows, columns and values.
FRAGMENTS = re.compile(r"\bFragments\b")
CORE = "src/cuda/gemm/sm90/"
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX|HA" r"CK)\b")
LESSON = re.compile(r"\b[Ll]essons? (\d+)")
COMMENT = re.compile(r"^\s*(?://[/<]*|\*)\s+(\S.*)$")
ANY_COMMENT = re.compile(r"(?://|/\*|^\s*\*\s)(.*)$")
# Files of Python by a path alone, as comments also name modules of other projects.
NAMED_FILE = re.compile(r"(?<![\w./{*-])((?:[\w-]+/)*[\w-]+\.(?:cuh|hpp|cpp|cu)|(?:[\w-]+/)+[\w-]+\.py)\b")
NO_SUBJECT = re.compile(r"(Of|By|What|Whether|Who|Whom|Whose|Which|How)\b")
CLAUSE = re.compile(r"(Where|When)\b")
DITTO = re.compile(r"//[/<]*\s+\.\.(?!\.)")
# Folders whose comments check_comments reads.
SENTENCES = ("include/", "src/", "cli/", "lm/", "huggingface/", "examples/")
# Lists of source mutants: (name, a file of src, a text that stands there once, ..).
MUTANTS = ("tests/emulator/mutants_test.py", "tests/emulator/sm100/mutants_test.py")


def check_lessons(path: str, text: str, lessons: str) -> list[str]:
    """Of a file of code: the lessons that it cites, by the numbers of docs/lessons.md."""
    return [f"{path}: cites lesson {number}, which docs/lessons.md does not have"
            for number in LESSON.findall(text) if not re.search(rf"^\*\*{number}\. ", lessons, re.MULTILINE)]


def check_files(path: str, text: str, ends: set[str]) -> list[str]:
    """Files that comments name, by their name or the end of their path, and that are not among `ends`."""
    return [f"{path}:{number}: a comment names {file}, which is no file; name the one that took its place"
            for number, line in enumerate(text.split("\n"), start=1) if (comment := ANY_COMMENT.search(line))
            for file in NAMED_FILE.findall(comment[1]) if file not in ends]


def ends_of(paths: list[str]) -> set[str]:
    parts = [path.split("/") for path in paths]
    return {"/".join(part[i:]) for part in parts for i in range(len(part))}


def check_mutants(listed: str, mutants: list[tuple], sources: dict[str, str]) -> list[str]:
    """Mutants of one list whose text does not stand once in their file (path in src -> text)."""
    return [f"{listed}: mutant `{name}`: its text stands {sources.get(file, '').count(text)} times in src/{file}, not "
            f"once; change it there as in the source: {text}"
            for name, file, text, *_ in mutants if sources.get(file, "").count(text) != 1]


def mutants_of(path: pathlib.Path) -> list[tuple]:
    sys.path.insert(0, str(path.parents[1] if path.parent.name == "sm100" else path.parent))  # mutant_runner.py
    try:
        return runpy.run_path(str(path), run_name="mutants")["MUTANTS"]
    finally:
        del sys.path[0]


def check_comments(path: str, text: str) -> list[str]:
    """Comments that begin with a word which leaves the sentence without a subject (`Of a warp.`, `Whether it fits.`),
    or with two dots that stand for words above. `Where` and `When` may begin a sentence that has a comma."""
    lines = text.split("\n")
    comments = [match[1] if (match := COMMENT.match(line)) and LICENCE not in line else None for line in lines]
    found = []
    for i, (line, comment) in enumerate(zip(lines, comments)):
        if DITTO.search(line):
            found.append(f"{path}:{i + 1}: a comment of `..` for words above; repeat them")
        before = comments[i - 1] if i > 0 else None
        if comment is None or before is not None and not re.search(r"[.!?]\)?$", before):
            continue  # no comment, or the middle of a sentence
        rest = itertools.takewhile(lambda one: one is not None, comments[i:])
        sentence = re.split(r"\.(?:\s|$)", " ".join(rest), maxsplit=1)[0]
        if NO_SUBJECT.match(comment) or CLAUSE.match(comment) and "," not in sentence:
            found.append(f"{path}:{i + 1}: a comment begins with `{comment.split()[0]}`; write a sentence with subject "
                         "and verb")
    return found


def check_text(path: str, text: str) -> list[str]:
    found = []
    lines = text.split("\n")
    suffix = pathlib.Path(path).suffix
    if suffix in NEEDS_LICENCE or path.endswith("CMakeLists.txt"):
        if not any(LICENCE in line for line in lines[:2]):
            found.append(f"{path}:1: opens without `{LICENCE}`")
    if suffix in CODE and len(lines) > MAX_LINES:
        found.append(f"{path}: {len(lines)} lines, more than {MAX_LINES}; split it")
    transport_only = suffix in REACH_WINDOWS and path.startswith("src/") and not path.startswith(TRANSPORT)
    core_only = suffix in CODE and path.startswith("src/") and not path.startswith(CORE)
    table = False  # between `clang-format off` and `on` lines may be as wide as the table is
    for number, line in enumerate(lines, start=1):
        table = table and "clang-format on" not in line or "clang-format off" in line
        where = f"{path}:{number}"
        if line != line.rstrip():
            found.append(f"{where}: white space at the end of the line")
        if suffix in NEEDS_LICENCE and len(line) > MAX_COLUMNS and not table:
            found.append(f"{where}: {len(line)} columns, more than {MAX_COLUMNS}")
        if UNFINISHED.search(line):
            found.append(f"{where}: marks unfinished work; file an issue instead")
        if core_only and FRAGMENTS.search(line):
            found.append(f"{where}: sees fragments outside {CORE}; use what Accumulators and Core give")
        if transport_only and RAW_WINDOW.search(line):
            found.append(f"{where}: indexes windows outside {TRANSPORT}; use Peer or OwnWindow")
    if suffix in CODE and path.startswith(SENTENCES):
        found += check_comments(path, text)
    if text and not text.endswith("\n"):
        found.append(f"{path}: no newline at the end")
    return found


def is_private(name: str) -> bool:
    """Names of ctypes and Python end in an underscore too; marks on objects of other packages name this one."""
    return name.startswith("_") and not name.endswith("_") and not name.startswith("_tessera_")


def names_made(tree: ast.AST) -> set[str]:
    """Private names that a file makes: definitions, variables, class members, and attributes of `self`."""
    made = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            made.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "ctx"):
                made.add(node.attr)
    return {name for name in made if is_private(name)}


def check_private_members(texts: dict[str, str]) -> list[str]:
    """Uses, in a file of a Python package (path -> text), of private members that only other files of it make."""
    trees = {path: ast.parse(text) for path, text in texts.items()}
    made = {path: names_made(tree) for path, tree in trees.items()}
    found = []
    for path, tree in trees.items():
        others = set().union(*[names for other, names in made.items() if other != path])
        for node in ast.walk(tree):
            used = []
            if isinstance(node, ast.Attribute) and node.attr not in made[path]:
                used = [node.attr]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tessera":
                used = [alias.name for alias in node.names]
            for name in used:
                if is_private(name) and name in others:
                    found.append(f"{path}:{node.lineno}: uses {name}, a private member of another file; give it a "
                                 "public name there, or move what needs it")
    return found


def check_file(root: pathlib.Path, path: str) -> list[str]:
    content = (root / path).read_bytes()
    if len(content) > MAX_BYTES:
        return [f"{path}: {len(content)} bytes, more than {MAX_BYTES}"]
    if b"\0" in content:
        return []
    return check_text(path, content.decode("utf-8", errors="replace"))


def main() -> int:
    root = pathlib.Path(__file__).parent.parent
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True)
    paths = [p for p in listed.stdout.decode().split("\0") if p and (root / p).is_file()]
    skipped = ("LICENSE", "THIRD_PARTY_NOTICES", "tests/fuzz/corpus/")
    found = [line for path in paths if not path.startswith(skipped) for line in check_file(root, path)]
    package = [path for path in paths if path.startswith("python/") and path.endswith(".py")]
    found += check_private_members({path: (root / path).read_text(encoding="utf-8") for path in package})
    lessons = (root / "docs/lessons.md").read_text(encoding="utf-8")
    found += [line for path in paths if pathlib.Path(path).suffix in CODE
              for line in check_lessons(path, (root / path).read_text(encoding="utf-8", errors="replace"), lessons)]
    ends = ends_of(paths)
    found += [line for path in paths if pathlib.Path(path).suffix in CODE
              for line in check_files(path, (root / path).read_text(encoding="utf-8", errors="replace"), ends)]
    for path in MUTANTS:
        mutants = mutants_of(root / path)
        files = {name for _, name, *_ in mutants if (root / "src" / name).is_file()}
        found += check_mutants(path, mutants, {name: (root / "src" / name).read_text(encoding="utf-8")
                                               for name in files})
    print("\n".join(found) or f"sources: ok ({len(paths)} files)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
