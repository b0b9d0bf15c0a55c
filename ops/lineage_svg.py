"""A graph of lineage as SVG: columns from left to right, ways as bands between their boxes. Pure, and self-contained.

Colours of squares: what a rollout was rewarded with, from the lowest of the picture to the highest; around zero where there
are rewards below it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import Final, NamedTuple

from rollwire.ops.lineage_boxes import COLUMNS, Cell, Graph, Node

WIDTH: Final = 204  # of a box
_GAP: Final = 66  # between columns
_ROOM: Final = 12  # between boxes
_LINE: Final = 15
_PAD: Final = 9
_MARGIN: Final = 28
_HEAD: Final = 108  # title, facts, names of the columns
_CHARS: Final = 33  # of a line in a box
_TIPPED: Final = 400  # squares of one box that each say what they are

INK, SOFT, RULE, PAPER = "#1b1f24", "#6e7781", "#d0d7de", "#ffffff"
ACCENT, LOW, MIDDLE, HIGH = "#0969da", "#c2387f", "#d9dee4", "#1a6fd4"
_TONES: Final = {
    "plain": ("#f6f8fa", "#afb8c1", INK),
    "focus": ("#ddf0ff", ACCENT, INK),
    "quiet": (PAPER, RULE, SOFT),
    "ended": ("#fff5f3", "#e0a49a", INK),
}


class _Box(NamedTuple):
    node: Node
    x: float
    y: float
    height: float


class _Grid(NamedTuple):
    """How a box's squares are laid out."""

    size: float
    pitch: float
    across: int
    rows: int

    @property
    def height(self) -> float:
        return self.rows * self.pitch


def draw_svg(graph: Graph, *, note: str = "") -> str:
    """`note` stands in the last line."""
    boxes = _laid_out(graph)
    columns = sorted({box.node.column for box in boxes.values()})
    width = max(_MARGIN * 2 + len(columns) * WIDTH + max(0, len(columns) - 1) * _GAP, 760)
    legend = _legend(graph)
    bottom = max((box.y + box.height for box in boxes.values()), default=_HEAD)
    height = bottom + 34 + (26 if legend else 0)
    scale = _scale([cell for box in boxes.values() for cell in box.node.cells])
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'height="{height:.0f}" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
        ),
        f"<title>{escape(graph.title)}</title>",
        f'<rect width="100%" height="100%" fill="{PAPER}"/>',
        _text(_MARGIN, 38, graph.title, 20, INK, bold=True),
        _text(_MARGIN, 60, graph.facts, 12.5, SOFT),
    ]
    if graph.findings:
        said = f"{graph.findings:,} finding{'s' if graph.findings > 1 else ''}: what is missing is not in the picture"
        parts.append(_text(width - _MARGIN, 38, said, 12.5, "#b3261e", anchor="end"))
    parts += [
        _text(x, _HEAD - 14, COLUMNS[column], 12, SOFT, bold=True) for column, x in _places(columns).items()
    ]
    parts.append('<g fill="none" class="edges">')
    largest = max((edge.weight for edge in graph.edges), default=1)
    for edge in sorted(graph.edges, key=lambda edge: edge.focus):
        source, target = boxes.get(edge.source), boxes.get(edge.target)
        if source is not None and target is not None:
            thick = 1.2 + 7.0 * (edge.weight / largest) ** 0.5 * (0.0 if largest == 1 else 1.0)
            parts.append(_way(source, target, thick, edge.source, edge.target, focus=edge.focus))
    parts.append("</g>")
    pitch = _pitch(graph.nodes)
    parts += [_box(box, scale, pitch) for box in boxes.values()]
    at = height - 16
    if legend:
        parts.append(_legend_drawn(legend, scale, at - 26))
    parts.append(_text(_MARGIN, at, note, 11, SOFT))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


# -- where things are -------------------------------------------------------------------------------------------------


def _places(columns: Sequence[int]) -> dict[int, float]:
    """Only columns with something in them are drawn."""
    return {column: _MARGIN + at * (WIDTH + _GAP) for at, column in enumerate(columns)}


def _laid_out(graph: Graph) -> dict[str, _Box]:
    """Every column in the middle; within one, boxes stand about as high as what leads to them, so that few ways cross."""
    by: dict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        by[node.column].append(node)
    places = _places(sorted(by))
    order = {node.name: at for nodes in by.values() for at, node in enumerate(nodes)}
    near: dict[str, list[str]] = defaultdict(list)
    for edge in graph.edges:
        near[edge.source].append(edge.target)
    for column in sorted(by, reverse=True):
        # As what is right of them stands; from groups on, and of rollouts by version, there is an order of their own.
        if column == 0 or (column == 1 and all(len(node.cells) == 1 for node in by[column])):

            def wanted(node: Node) -> float:
                targets = [order[name] for name in near[node.name] if name in order]
                return sum(targets) / len(targets) if targets else len(order)

            by[column].sort(key=wanted)
            order.update({node.name: at for at, node in enumerate(by[column])})
    pitch = _pitch(graph.nodes)
    heights = {node.name: _height(node, pitch) for nodes in by.values() for node in nodes}
    totals = {
        column: sum(heights[node.name] for node in nodes) + _ROOM * (len(nodes) - 1)
        for column, nodes in by.items()
    }
    tallest = max(totals.values(), default=0.0)
    boxes: dict[str, _Box] = {}
    for column, nodes in by.items():
        y = _HEAD + (tallest - totals[column]) / 2
        for node in nodes:
            boxes[node.name] = _Box(node, places[column], y, heights[node.name])
            y += heights[node.name] + _ROOM
    return boxes


def _height(node: Node, pitch: float) -> float:
    grid = _grid(node, pitch)
    squares = grid.height + 5 if grid.rows else 0.0
    return 2 * _PAD + _LINE * (1 + len(node.lines)) - 3 + squares


def _pitch(nodes: Sequence[Node]) -> float:
    """Of the squares of all boxes: in one picture a rollout is as large as any other."""
    most = max((len(node.cells) for node in nodes), default=0)
    return 11.0 if most <= 64 else 7.0 if most <= 400 else 4.5


def _grid(node: Node, pitch: float) -> _Grid:
    count = len(node.cells)
    if count <= 1:
        return _Grid(0, 0, 1, 0)
    across = int((WIDTH - 2 * _PAD) / pitch)
    return _Grid(pitch - (2.0 if pitch > 5 else 1.0), pitch, across, -(-count // across))


# -- how they look ----------------------------------------------------------------------------------------------------


def _box(box: _Box, scale: tuple[float, float], pitch: float) -> str:
    node, grid = box.node, _grid(box.node, pitch)
    fill, stroke, ink = _TONES[node.tone]
    dash = ' stroke-dasharray="4 3"' if node.tone == "quiet" else ""
    wide = 2 if node.tone == "focus" else 1
    tip = escape("\n".join((node.title, *node.lines)))
    parts = [
        f'<g class="box" data-name="{escape(node.name, quote=True)}"><title>{tip}</title>',
        (
            f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{WIDTH}" height="{box.height:.1f}" rx="6" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="{wide}"{dash}/>'
        ),
    ]
    left = box.x + _PAD
    if len(node.cells) == 1:
        parts.append(_mark(node.cells[0], scale, box.x + 1, box.y + 1, box.height - 2))
        left += 5
    y = box.y + _PAD + 10
    parts.append(_text(left, y, _fit(node.title, _CHARS - 10), 12.5, ink, bold=True))
    for line in node.lines:
        y += _LINE
        parts.append(_text(left, y, _fit(line, _CHARS), 11, SOFT))
    if grid.rows:
        parts.append(_squares(node.cells, grid, scale, left, y + 8))
    parts.append("</g>")
    return "".join(parts)


def _mark(cell: Cell, scale: tuple[float, float], x: float, y: float, height: float) -> str:
    """The only rollout of a box, as its left edge."""
    colour = _colour(cell.reward, scale)
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="6" height="{height:.1f}" rx="3" fill="{colour}"/>'


def _squares(cells: Sequence[Cell], grid: _Grid, scale: tuple[float, float], left: float, top: float) -> str:
    parts: list[str] = []
    for at, cell in enumerate(cells):
        x, y = left + at % grid.across * grid.pitch, top + at // grid.across * grid.pitch
        colour = _colour(cell.reward, scale)
        # What was not trained on is an outline.
        look = f'fill="{colour}"'
        size = grid.size
        if cell.trained is False or cell.reward is None:
            look = (
                f'fill="{PAPER}" stroke="{colour if cell.reward is not None else "#8c959f"}" stroke-width="1"'
            )
            x, y, size = x + 0.5, y + 0.5, size - 1
        if cell.focus:
            look += f' stroke="{INK}" stroke-width="1.6"' if "stroke" not in look else ""
        tip = f"<title>{escape(cell.tip)}</title>" if len(cells) <= _TIPPED else ""
        shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{size:.1f}" height="{size:.1f}" {look}'
        parts.append(f"{shape}>{tip}</rect>" if tip else f"{shape}/>")
    return "".join(parts)


def _way(source: _Box, target: _Box, thick: float, named: str, to: str, *, focus: bool) -> str:
    colour, seen = (ACCENT, 0.75) if focus else ("#8c959f", 0.38)
    if source.node.column == target.node.column:  # one below the other
        x = source.x + WIDTH / 2
        start, end = source.y + source.height, target.y
        path = f"M{x:.1f} {start:.1f}L{x:.1f} {end:.1f}"
        thick = 2.0
    else:
        x1, y1 = source.x + WIDTH, source.y + source.height / 2
        x2, y2 = target.x, target.y + target.height / 2
        bend = max(_GAP * 0.55, (x2 - x1) * 0.45)
        path = f"M{x1:.1f} {y1:.1f}C{x1 + bend:.1f} {y1:.1f} {x2 - bend:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
    names = f'data-from="{escape(named, quote=True)}" data-to="{escape(to, quote=True)}"'
    return f'<path {names} d="{path}" stroke="{colour}" stroke-opacity="{seen}" stroke-width="{thick:.1f}"/>'


def _text(
    x: float, y: float, text: str, size: float, colour: str, *, bold: bool = False, anchor: str = "start"
) -> str:
    weight = ' font-weight="600"' if bold else ""
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}"{weight}{place}>{escape(text)}</text>'


def _fit(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


# -- what colours mean ------------------------------------------------------------------------------------------------


def _scale(cells: Sequence[Cell]) -> tuple[float, float]:
    rewards = [cell.reward for cell in cells if cell.reward is not None]
    low, high = min(rewards, default=0.0), max(rewards, default=1.0)
    high = max(1.0, -low, high)
    return (-high if low < 0 else 0.0), high


def _colour(reward: float | None, scale: tuple[float, float]) -> str:
    if reward is None:
        return PAPER
    low, high = scale
    if low < 0:
        share = reward / high
        return _mixed(MIDDLE, HIGH if share > 0 else LOW, min(1.0, abs(share)))
    return _mixed(MIDDLE, HIGH, (reward - low) / (high - low) if high > low else 1.0)


def _mixed(start: str, end: str, share: float) -> str:
    pairs = zip(_bytes(start), _bytes(end), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def _bytes(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def _legend(graph: Graph) -> tuple[str, ...]:
    """What the squares of this picture need explained."""
    cells = [cell for node in graph.nodes for cell in node.cells]
    if not cells:
        return ()
    found = ["reward"]
    if any(len(node.cells) > 1 for node in graph.nodes):
        found.append("square")
    if any(cell.reward is None for cell in cells):
        found.append("unscored")
    if any(cell.trained is False and cell.reward is not None for cell in cells):
        found.append("untrained")
    return tuple(found)


def _legend_drawn(legend: Sequence[str], scale: tuple[float, float], y: float) -> str:
    low, high = scale
    x = float(_MARGIN)
    parts = [_text(x, y, "reward", 11, SOFT), _text(x + 44, y, f"{low:.3g}", 11, SOFT)]
    x += 44 + 8 * len(f"{low:.3g}") + 4
    for step in range(24):
        value = low + (high - low) * step / 23
        parts.append(
            f'<rect x="{x + step * 5:.1f}" y="{y - 9:.1f}" width="5" height="10" fill="{_colour(value, scale)}"/>'
        )
    x += 126
    parts.append(_text(x, y, f"{high:.3g}", 11, SOFT))
    x += 8 * len(f"{high:.3g}") + 24
    told = {
        "square": (f'fill="{_colour(high, scale)}"', "a square is a rollout"),
        "unscored": (f'fill="{PAPER}" stroke="#8c959f"', "no reward"),
        "untrained": (f'fill="{PAPER}" stroke="{_colour(high, scale)}"', "not trained on"),
    }
    for name, (look, text) in told.items():
        if name in legend:
            parts.append(f'<rect x="{x:.1f}" y="{y - 8.5:.1f}" width="8" height="8" {look}/>')
            parts.append(_text(x + 14, y, text, 11, SOFT))
            x += 14 + 6.2 * len(text) + 22
    return "".join(parts)
