#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/performance.md from results files, so that no number there is typed.

    tools/performance_tables.py            writes what markers enclose
    tools/performance_tables.py --check    changes nothing; fails where a table is not what its files say, where a
                                           number stands outside a table, or where the page is too long

A marker is a line `<!-- table NAME FILE.json .. -->`, and its table ends at `<!-- end -->`. Files are paths below
bench/results; NAME is a function in TABLES. Each table begins with a line that links its files and names the build;
files of bench/results/archive are marked as an earlier build's. A row that was not checked is not quoted, unless it is
a bound by cuBLAS.
"""

import argparse
import json
import math
import pathlib
import re
import statistics
import sys

import current_results

MAX_LINES = 150
AIM = 0.85  # share of the speed of a pass's GEMMs that is wanted over several GPUs
BLOCK = re.compile(r"(<!-- table (\S+) (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
# What may hold digits: code, links' targets, comments, and words with a letter or a sign in them (H200, bf16, 2^-7).
NO_PROSE = (re.compile(r"<!-- table .*?<!-- end -->", re.DOTALL), re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE),
            re.compile(r"<!--.*?-->", re.DOTALL), re.compile(r"`[^`\n]*`"), re.compile(r"\]\([^)]*\)"))
NUMBER = re.compile(r"(?<![\w^.,-])\d+(?:[.,]\d+)*(?![\w^-]|[.,]\w)")


class Rows:
    """The rows of one file that may be quoted."""

    def __init__(self, document: dict):
        rows = map(current_results.convert_row, document["rows"])
        self.rows = [row for row in rows if row.get("checked") or current_results.is_bound(row)]

    def ms(self, **wanted) -> float | None:
        """The median of the rows that have these values, None without any; a tuple names several allowed values."""
        rows = self.find(**wanted)
        return statistics.median(row["ms"] for row in rows) if rows else None

    def find(self, **wanted) -> list[dict]:
        return [row for row in self.rows if all(
            row.get(key, "") in value if isinstance(value, tuple) else row.get(key, "") == value
            for key, value in wanted.items())]

    def values(self, *keys: str, **wanted) -> list[tuple]:
        """Different values of these keys, in the file's order."""
        return list(dict.fromkeys(
            tuple(tuple(row[key]) if key == "shape" else row[key] for key in keys) for row in self.find(**wanted)))


def number(value: float | None, digits: int = 3) -> str:
    """With so many significant digits, and never with an exponent."""
    if value is None:
        return ""
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{decimals}f}"


def ratio(value: float | None, aim: float = 1) -> str:
    """Bold below the aim."""
    if value is None:
        return ""
    text = f"{value:.2f}" if value >= aim or f"{value:.2f}" != f"{aim:.2f}" else f"{value:.3f}"
    return f"**{text}**" if value < aim else text


def over(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def layer(files: list[Rows]) -> list[list[str]]:
    """The layer's score, (bound + aggregation at copy speed) / time, of the first file; SonicMoE's time over Tessera's
    on the same layers, of the second, whose times are of passes that the GPU alone decides. Layers of further files
    follow the means, which are not theirs."""
    own, beside, *apart = files
    table = [["configuration (T, d, n, E, K)", "forward ms", "score", "backward ms", "score",
              "score with fp32 main gradients", "SonicMoE, forward ms", "over Tessera", "backward ms", "over Tessera"]]
    scores: list[list[float]] = [[], [], []]
    ratios: dict[str, list[float]] = {"forward": [], "backward": []}

    def cells_of(file: Rows, config: str, shape: tuple, scores: list[list[float]]) -> list[str]:
        cells = [f"{config} {shape}"]
        for found, (what, variant) in zip(scores, (("forward", ""), ("backward", ""), ("backward", "main-grad"))):
            rows = file.find(config=config, impl="tessera", variant=variant, **{"pass": what})
            found.append(statistics.median((row["bound_ms"] + row["aggregate_floor_ms"]) / row["ms"] for row in rows))
            cells += [number(statistics.median(row["ms"] for row in rows))] if not variant else []
            cells.append(f"{found[-1]:.3f}")
        return cells

    for config, shape in own.values("config", "shape", impl="tessera"):
        cells = cells_of(own, config, shape, scores)
        for what, found in ratios.items():
            ours, theirs = (beside.ms(config=config, shape=list(shape), impl=impl, **{"pass": what})
                            for impl in ("tessera", "sonicmoe"))
            found.append(theirs / ours)
            cells += [number(theirs), ratio(found[-1])]
        table.append(cells)
    means = [f"{statistics.geometric_mean(found):.3f}" for found in scores]
    over_ours = [ratio(statistics.geometric_mean(found)) for found in ratios.values()]
    others = [[*cells_of(file, config, shape, [[], [], []]), "", "", "", ""]
              for file in apart for config, shape in file.values("config", "shape", impl="tessera")]
    mean = ["geometric mean", "", means[0], "", means[1], means[2], "", over_ours[0], "", over_ours[1]]
    return [*table, mean, *others]


# Kernels whose time depends on rounding, but for the GEMMs over the experts' rows.
ROUNDING = {"forward": ("route", "choose_tokens", "metadata", "aggregate"),
            "backward": ("dscores", "router_dlogits", "router_dgrad", "aggregate")}


def rounding(files: list[Rows]) -> list[list[str]]:
    """Pairs of files, exact and rounded: times of both passes, in how many times the rounded one the exact one takes,
    and what rounding costs: the sum of the kernels that it adds or changes, less those of the exact layer."""
    table = [["configuration (T, d, n, E, K)", "exact, forward ms", "rounded", "times as fast", "exact, backward ms",
              "rounded", "times as fast", "cost of rounding, forward us", "backward us"]]
    for exact, rounded in zip(files[::2], files[1::2]):
        for config, shape in exact.values("config", "shape", impl="tessera"):
            key = {"config": config, "shape": list(shape), "impl": "tessera"}
            cells, costs = [f"{config} {shape}"], []
            for what, kernels in ROUNDING.items():
                one, other = (file.ms(variant="", **key, **{"pass": what}) for file in (exact, rounded))
                cells += [number(one), number(other), ratio(over(one, other))]
                variant = "kernel" if what == "forward" else "backward kernel"
                before, after = (sum(file.ms(variant=variant, **key, **{"pass": kernel}) or 0 for kernel in kernels)
                                 for file in (exact, rounded))
                costs.append(f"{1000 * (after - before):.0f}")
            table.append(cells + costs)
    return table


def experts(files: list[Rows]) -> list[list[str]]:
    """Forward and backward of the experts through Python: time, and in how many times ours others take. On a CPU times
    are those of one thread."""
    others = {"torch-grouped-mm": "eager layer around torch's grouped_mm", "hf-grouped-mm": "transformers, grouped_mm",
              "hf-eager": "transformers, eager"}
    table = [["layer, forward and backward", "Tessera, ms", *(name for name in others.values())]]
    for file in files:
        for config, dtype, gpus in file.values("config", "dtype", "gpus"):
            ours, *theirs = (file.ms(config=config, dtype=dtype, impl=impl, **{"pass": "training"})
                             for impl in ("tessera", *others))
            table.append([f"{config}, {dtype}, {'GPU' if gpus else 'CPU'}", number(ours),
                          *(f"{number(one)}, {ratio(one / ours)} times" if one else "" for one in theirs)])
    return table


def over_gpus(files: list[Rows]) -> list[list[str]]:
    """Forward in one launch, beside its GEMMs, cuBLAS's, a launch a part, and the layer with all experts on one GPU."""
    table = [["GPUs, layer", "T of a GPU", "fused, ms", "its GEMMs alone, ms", "share of their speed",
              "share of cuBLAS's bmm", "unfused, ms", "all experts on one GPU, ms"]]
    for file in files:
        for gpus, config, transfer in file.values("gpus", "config", "transfer", variant="fused"):
            shapes = [shape for (shape,) in file.values("shape", config=config, variant="fused") if shape[0] >= 4096]
            cells: list[list[str]] = [[str(shape[0]) for shape in shapes], *([] for _ in range(6))]
            for shape in shapes:
                key = {"config": config, "shape": list(shape)}
                fused, unfused, one = (file.ms(variant=variant, impl="tessera", **key, **{"pass": "forward-inference"})
                                       for variant in ("fused", "unfused", "one-gpu"))
                ours, cublas = (file.ms(impl=impl, **key, **{"pass": "gemms"}) for impl in ("tessera", "cublas-bmm"))
                for cell, text in zip(cells[1:], (number(fused), number(ours), ratio(over(ours, fused), AIM),
                                                  ratio(over(cublas, fused), AIM), number(unfused), number(one))):
                    cell.append(text)
            more = ", partial combine" if transfer == "partial-combine" else ""
            table.append([f"{gpus}, {config}{more}", *(", ".join(filter(None, cell)) for cell in cells)])
    return table


def python_over_gpus(files: list[Rows]) -> list[list[str]]:
    """Forward from Python behind the stream's earlier work, beside LigerCute and torch around NCCL."""
    table = [["GPUs", "layer", "T of a GPU", "Tessera, ms", "x where peers read it, ms", "LigerCute, ms", "times ours",
              "eager torch around NCCL, ms", "times ours"]]
    for file in files:
        for gpus, config, shape in file.values("gpus", "config", "shape", impl="tessera", behind="stream"):
            key = {"gpus": gpus, "config": config, "shape": list(shape), "behind": "stream",
                   "pass": "forward-inference"}
            ours = file.ms(impl="tessera", variant=("torch", ""), **key)
            in_place, liger, nccl = (file.ms(impl=impl, **key)
                                     for impl in ("tessera-in-place", "liger-cute", "nccl-grouped-mm"))
            table.append([str(gpus), config, str(shape[0]), number(ours), number(in_place), number(liger),
                          ratio(over(liger, ours)), number(nccl), ratio(over(nccl, ours))])
    return table


def training(files: list[Rows]) -> list[list[str]]:
    """Forward and backward of a layer over several GPUs, and the MiB that it keeps between them besides o."""
    table = [["GPUs", "layer", "T of a GPU", "Tessera, ms", "saved, MiB", '`save="x"`, ms', "saved, MiB",
              "eager torch around NCCL, ms", "saved, MiB", "six GEMMs by cuBLAS, ms", "share of their speed"]]
    for file in files:
        for gpus, config, shape in file.values("gpus", "config", "shape", impl="tessera"):
            if shape[0] != 8192:
                continue
            key, cells = {"gpus": gpus, "config": config, "shape": list(shape)}, []
            for impl in ("tessera", "tessera-save-x", "nccl-grouped-mm"):
                rows = file.find(impl=impl, **key, **{"pass": "training"})
                cells += [number(statistics.median(row["ms"] for row in rows)),
                          number(statistics.median(row["saved_bytes"] for row in rows) / 2**20)]
            cublas = file.ms(impl="cublas-bmm", **key, **{"pass": "gemms-training"})
            ours = file.ms(impl="tessera", **key, **{"pass": "training"})
            table.append([str(gpus), config, str(shape[0]), *cells, number(cublas), ratio(over(cublas, ours), AIM)])
    return table


def train_step(files: list[Rows]) -> list[list[str]]:
    """A step of a whole model with the experts of several libraries: of the first file's cut and of the second file's
    whole model at one batch for all, then, of the third, of the whole model each with the largest batch that it has
    memory for. Ratios are how many times as fast Tessera's layer is."""
    one_batch, largest = files[:2], files[2]
    step = {"pass": "train-step"}
    faster = "Tessera's layer is times as fast"
    table = [["experts of the model", "cut: step, ms", faster, "peak, GiB", "all layers: step, ms", faster, "peak, GiB",
              "largest batch, tokens", "tokens/s of a GPU", faster]]
    names = {"tessera-layer": "Tessera's layer, router included", "tessera": "Tessera's, the model's router",
             "torch-grouped-mm": "torch, grouped_mm", "hf-grouped-mm": "transformers, grouped_mm"}
    best = largest.find(impl="tessera-layer", **step)[0]["tokens_per_s_per_gpu"]
    for row in sorted(one_batch[0].find(**step), key=lambda row: row["ms"]):
        known = {"impl": row["impl"], "variant": row["variant"], **step}
        cells = [names.get(row["impl"], row["impl"]) + (f", {row['variant']}" if row["variant"] else "")]
        for file in one_batch:
            ours = file.ms(impl="tessera-layer", variant="", **step)
            cells += [cell for own in file.find(**known)
                      for cell in (number(own["ms"]), ratio(own["ms"] / ours), number(own["peak_bytes"] / 2**30))
                      ] or [""] * 3
        cells += [cell for own in largest.find(**known)
                  for cell in (f"{own['batch_tokens']:,}", f"{own['tokens_per_s_per_gpu']:,}",
                               ratio(best / own["tokens_per_s_per_gpu"]))] or [""] * 3
        table.append(cells)
    return table


TABLES = {table.__name__.replace("_", "-"): table
          for table in (layer, rounding, experts, over_gpus, python_over_gpus, training, train_step)}


def caption(files: list[str], documents: list[dict], results: str) -> str:
    """Which device and build the table is of, with links; `results` is the way from the page to bench/results."""
    links = []
    for file, document in zip(files, documents):
        earlier = ", **an earlier build**" if file.startswith("archive/") else ""
        links.append(f"[{document['device']}, {document['date']}]({results}/{file}), "
                     f"build `{document['commit'][:7]}`{earlier}")
    return "; ".join(links) + "."


def render(name: str, files: list[str], results: pathlib.Path, link: str) -> str:
    documents = [json.loads((results / file).read_text(encoding="utf-8")) for file in files]
    header, *rows = TABLES[name]([Rows(document) for document in documents])
    if any(len(row) != len(header) for row in rows):
        raise ValueError(f"table {name}: rows and header differ in columns")
    lines = [caption(files, documents, link), "", header, ["---"] * len(header), *rows]
    return "\n".join(line if isinstance(line, str) else f"| {' | '.join(line)} |" for line in lines) + "\n"


def written(text: str, results: pathlib.Path, link: str) -> str:
    """The page with its tables as the files say."""
    if text.count("<!-- table ") != len(BLOCK.findall(text)) or text.count("<!-- end -->") != len(BLOCK.findall(text)):
        raise ValueError("a table's marker without its <!-- end -->, or an end without a marker")
    return BLOCK.sub(lambda match: match[1] + render(match[2], match[3].split(), results, link) + match[5], text)


def typed_numbers(text: str) -> list[str]:
    """Numbers outside tables, code and links."""
    for pattern in NO_PROSE:
        text = pattern.sub(" ", text)
    return NUMBER.findall(text)


def check(text: str, results: pathlib.Path, link: str) -> list[str]:
    found = []
    if written(text, results, link) != text:
        found.append("a table is not what its files say; run tools/performance_tables.py")
    if typed := typed_numbers(text):
        found.append(f"{len(typed)} numbers are typed ({', '.join(typed[:8])}); let a table say them")
    if (lines := len(text.splitlines())) > MAX_LINES:
        found.append(f"{lines} lines, more than {MAX_LINES}; the notebook keeps the story")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parents[1]
    page = root / "docs/performance.md"
    text, results, link = page.read_text(encoding="utf-8"), root / "bench/results", "../bench/results"
    if not options.check:
        page.write_text(written(text, results, link), encoding="utf-8")
        return
    found = check(text, results, link)
    for line in found:
        print(f"docs/performance.md: {line}")
    if not found:
        print(f"performance tables: ok ({len(BLOCK.findall(text))} tables)")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
