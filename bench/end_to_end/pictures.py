# SPDX-License-Identifier: Apache-2.0
"""Pictures of a run as SVG, written as they are, so that nothing has to be installed for them."""

import pathlib

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 70, 40, 20, 50
COLORS = ("#1b6ca8", "#c0392b", "#2e8b57", "#8e5ea2", "#d98a00", "#555555")


def _page(body: list[str], title: str, width: int = WIDTH, height: int = HEIGHT) -> str:
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="12">', f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{title}</text>', *body, "</svg>", ""])


def curves(path: pathlib.Path, series: dict, title: str, x_name: str, y_name: str) -> None:
    """series: (x, y) pairs by name, a line each."""
    points = [point for line in series.values() for point in line]
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    x0, x1, y0, y1 = min(xs), max(max(xs), min(xs) + 1e-9), min(ys), max(max(ys), min(ys) + 1e-9)

    def at(x: float, y: float) -> tuple[float, float]:
        return (LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT),
                HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM))

    body = []
    for i in range(5):
        y, x = y0 + (y1 - y0) * i / 4, x0 + (x1 - x0) * i / 4
        body.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at(x0, y)[1]:.1f}" y2="{at(x0, y)[1]:.1f}" '
                    'stroke="#ddd"/>')
        body.append(f'<text x="{LEFT - 6}" y="{at(x0, y)[1] + 4:.1f}" text-anchor="end">{y:.4g}</text>')
        body.append(f'<text x="{at(x, y0)[0]:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:.4g}</text>')
    for i, (name, line) in enumerate(series.items()):
        color = COLORS[i % len(COLORS)]
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line))
        body.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{places}"/>')
        body.append(f'<text x="{WIDTH - RIGHT - 6}" y="{TOP + 14 + 16 * i}" text-anchor="end" fill="{color}">{name}'
                    '</text>')
    body.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">{x_name}</text>')
    body.append(f'<text x="14" y="{TOP - 6}">{y_name}</text>')
    path.write_text(_page(body, title), encoding="utf-8")


def loads(path: pathlib.Path, counts: list[list[int]], title: str) -> None:
    """counts [layers][E]: a row of cells for each layer, darker where an expert has more than the mean (white: none,
    black: four times the mean or more)."""
    experts = len(counts[0])
    cell, row = max(2.0, (WIDTH - LEFT - RIGHT) / experts), 12
    body = []
    for layer, line in enumerate(counts):
        mean = max(sum(line) / experts, 1e-9)
        body.append(f'<text x="{LEFT - 6}" y="{TOP + row * layer + 10}" text-anchor="end">{layer}</text>')
        for e, count in enumerate(line):
            shade = 255 - round(255 * min(count / mean / 4, 1.0))
            body.append(f'<rect x="{LEFT + cell * e:.1f}" y="{TOP + row * layer}" width="{cell:.1f}" '
                        f'height="{row - 1}" fill="rgb({shade},{shade},{shade})"/>')
    height = TOP + row * len(counts) + BOTTOM
    body.append(f'<text x="{WIDTH / 2}" y="{height - 12}" text-anchor="middle">expert (a row for each layer)</text>')
    path.write_text(_page(body, title, width=int(LEFT + cell * experts + RIGHT), height=height), encoding="utf-8")
