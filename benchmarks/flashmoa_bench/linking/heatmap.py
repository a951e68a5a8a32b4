"""Draw a heat map of speed-ups as a self-contained SVG, in the manner of Figure 6; pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from flashmoa_bench.linking.overlap import HandoffCell

_CELL = (58, 22)
_LABELS = 150
_TOP = 64
_GAP = 36
# Colours of cells slower than the baseline, as fast, and as fast as the fastest cell.
_WORST, _EVEN, _BEST = (178, 24, 43), (247, 247, 247), (33, 102, 172)


def draw(cells: Sequence[HandoffCell], title: str) -> str:
    """Draw one panel per baseline: workloads down, concurrency across, speed-ups as colours."""
    rows = list(dict.fromkeys(cell.workload.label for cell in cells))
    columns = sorted({cell.workload.concurrency for cell in cells})
    ways = list(cells[0].speedup)
    best = max(value for cell in cells for value in cell.speedup.values())
    panel = _CELL[0] * len(columns) + _GAP
    width = _LABELS + panel * len(ways)
    height = _TOP + _CELL[1] * len(rows) + 16
    parts = [_text(8, 18, title, weight="bold")]
    parts.append(_text(_LABELS - 8, 58, "TPS/Prefix/Upstream", anchor="end"))
    parts += [
        _text(_LABELS - 8, _baseline(place), row, anchor="end") for place, row in enumerate(rows)
    ]
    for place, way in enumerate(ways):
        left = _LABELS + place * panel
        parts.append(_text(left, 40, f"vs {way}"))
        parts += [
            _text(left + _CELL[0] * (i + 0.5), 58, f"C={column}", anchor="middle")
            for i, column in enumerate(columns)
        ]
        parts += [_tile(cell, way, left, rows, columns, best) for cell in cells]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def colour(speedup: float, best: float) -> str:
    """Return a speed-up's colour: white at 1, blue towards ``best``, red towards half as fast."""
    end, share = (
        (_BEST, (speedup - 1) / (best - 1) if best > 1 else 0.0)
        if speedup >= 1
        else (_WORST, (1 - speedup) / 0.5)
    )
    share = min(1.0, share)
    mixed = [round(a + (b - a) * share) for a, b in zip(_EVEN, end, strict=True)]
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _baseline(row: int) -> float:
    """Return the y coordinate of a row's text."""
    return _TOP + _CELL[1] * row + 15


def _tile(
    cell: HandoffCell, way: str, left: float, rows: list[str], columns: list[int], best: float
) -> str:
    value = cell.speedup[way]
    x = left + _CELL[0] * columns.index(cell.workload.concurrency)
    row = rows.index(cell.workload.label)
    fill = colour(value, best)
    is_dark = best > 1 and (value - 1) / (best - 1) > 0.55
    return (
        f'<rect x="{x}" y="{_TOP + _CELL[1] * row}" width="{_CELL[0] - 1}" '
        f'height="{_CELL[1] - 1}" fill="{fill}"/>'
        + _text(
            x + _CELL[0] / 2,
            _baseline(row),
            f"{value:.2f}x",
            anchor="middle",
            fill="white" if is_dark else "black",
        )
    )


def _text(x: float, y: float, text: str, **style: str) -> str:
    names = {"anchor": "text-anchor", "weight": "font-weight", "fill": "fill"}
    extra = "".join(f' {names[name]}="{value}"' for name, value in style.items())
    return f'<text x="{x:g}" y="{y:g}"{extra}>{escape(text)}</text>'
