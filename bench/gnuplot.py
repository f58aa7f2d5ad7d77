# SPDX-License-Identifier: Apache-2.0
"""Bars drawn by gnuplot, for the pictures of docs/performance.md."""

import pathlib
import subprocess


def block(name: str, header: list[str], rows: list[list]) -> str:
    lines = [" ".join(f'"{field}"' if isinstance(field, str) else f"{field:.3f}" for field in row) for row in rows]
    return f"${name} << EOD\n" + " ".join(f'"{field}"' for field in header) + "\n" + "\n".join(lines) + "\nEOD\n"


def write(script: str, picture: pathlib.Path, width: int, height: int):
    head = (f"set terminal svg size {width},{height} background 'white' font 'sans,13'\nset output '{picture}'\n"
            "set style data histograms\nset style fill solid 0.9 border 0\nset grid y\nset boxwidth 0.9\n")
    subprocess.run(["gnuplot"], input=head + script, text=True, check=True)
    lines = picture.read_text().splitlines()
    picture.write_text("".join(line.rstrip() + "\n" for line in lines))  # gnuplot leaves blanks at ends
