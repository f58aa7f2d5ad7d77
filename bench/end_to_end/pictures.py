# SPDX-License-Identifier: Apache-2.0
"""Pictures of a run, drawn by gnuplot. The script, which holds the data, is left beside each picture: where gnuplot is
not installed it can draw the picture later."""

import pathlib
import subprocess


def _draw(path: pathlib.Path, script: str, height: int) -> str:
    """Writes `path` with the ending .gp and, if it can, `path` itself; says in one line what is missing, or nothing."""
    source = path.with_suffix(".gp")
    source.write_text(f"set terminal svg size 760,{height} background 'white' font 'sans,12'\n"
                      f"set output '{path.name}'\n{script}", encoding="utf-8")
    try:
        done = subprocess.run(["gnuplot", source.name], cwd=path.parent, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        return f"gnuplot is not installed: no {path}; {source} can draw it later"
    return f"gnuplot failed on {source}: no picture" if done.returncode else ""


def curves(path: pathlib.Path, series: dict, title: str, x_name: str, y_name: str) -> str:
    """series: (x, y) pairs by name, a line each. Returns what to say of the picture, or nothing."""
    blocks = "".join(f"$line{i} << EOD\n" + "".join(f"{x:.9g} {y:.9g}\n" for x, y in line) + "EOD\n"
                     for i, line in enumerate(series.values()))
    lines = ", ".join(f"$line{i} with lines linewidth 1.5 title \"{name}\"" for i, name in enumerate(series))
    return _draw(path, f"{blocks}set title \"{title}\"\nset xlabel \"{x_name}\"\nset ylabel \"{y_name}\"\nset grid\n"
                       f"plot {lines}\n", 420)


def loads(path: pathlib.Path, counts: list[list[int]], title: str) -> str:
    """counts [layers][E]: a row of cells for each layer, darker where an expert has more than the mean (white: none,
    black: four times the mean or more). Returns what to say of the picture, or nothing."""
    rows = [[count * len(line) / max(sum(line), 1) for count in line] for line in counts]
    block = "$loads << EOD\n" + "".join(" ".join(f"{load:.4g}" for load in row) + "\n" for row in rows) + "EOD\n"
    return _draw(path, f"{block}set title \"{title}\"\nset xlabel \"expert\"\nset ylabel \"layer\"\n"
                       "set palette defined (0 'white', 4 'black')\nset cbrange [0:4]\n"
                       f"set xrange [-0.5:{len(rows[0]) - 0.5}]\nset yrange [{len(rows) - 0.5}:-0.5]\n"
                       "plot $loads matrix with image notitle\n", 140 + 14 * len(rows))
