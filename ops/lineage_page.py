"""An answer of lineage as a picture in a file: SVG alone, or a page that says more about what is pointed at."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Final

import msgspec

from rollwire.consumers.audit.lineage import Answer
from rollwire.ops.lineage_boxes import Graph
from rollwire.ops.lineage_graph import graph_of
from rollwire.ops.lineage_svg import draw_svg

_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ margin: 0; background: #fff; color: #1b1f24; font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }}
.graph {{ overflow-x: auto; padding-bottom: 4px; }}
.graph svg {{ display: block; max-width: 100%; height: auto; }}
.box {{ cursor: pointer; }}
.lit .box, .lit .edges path {{ opacity: .16; }}
.lit .box.on, .lit .edges path.on {{ opacity: 1; }}
section {{ max-width: 1300px; padding: 4px 28px 20px; }}
h2 {{ font-size: 15px; margin: 14px 0 6px; }}
pre {{ font: 12px/1.5 ui-monospace, SFMono-Regular, Menlo, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0;
  max-height: 26em; overflow-y: auto; background: #f6f8fa; border: 1px solid #d0d7de; border-radius: 6px; padding: 10px 12px; }}
td, th {{ text-align: left; vertical-align: top; padding: 3px 18px 3px 0; overflow-wrap: anywhere; }}
.bad {{ color: #b3261e; white-space: nowrap; }}
.soft {{ color: #6e7781; }}
</style>
</head>
<body>
<div class="graph">
{svg}</div>
<section>
<h2 id="what">Point at a box to see what belongs to it; click it to read what it stands for.</h2>
<pre id="listed" hidden></pre>
{report}
</section>
<script id="boxes" type="application/json">{boxes}</script>
<script>
{script}
</script>
</body>
</html>
"""

_SCRIPT: Final = """
const boxes = JSON.parse(document.getElementById("boxes").textContent);
const svg = document.querySelector("svg"), paths = [...svg.querySelectorAll(".edges path")];
const named = new Map([...svg.querySelectorAll(".box")].map(box => [box.dataset.name, box]));
let kept = null;
function along(name, from, to, seen) {
  if (seen.has(name)) return seen;
  seen.add(name);
  for (const path of paths) if (path.dataset[from] === name) { path.classList.add("on"); along(path.dataset[to], from, to, seen); }
  return seen;
}
function light(name) {
  svg.querySelectorAll(".on").forEach(one => one.classList.remove("on"));
  svg.classList.toggle("lit", name !== null);
  if (name === null) return;
  for (const one of [...along(name, "from", "to", new Set()), ...along(name, "to", "from", new Set())]) named.get(one)?.classList.add("on");
}
for (const [name, box] of named) {
  box.addEventListener("mouseenter", () => light(name));
  box.addEventListener("mouseleave", () => light(kept));
  box.addEventListener("click", event => {
    kept = kept === name ? null : name;
    light(kept ?? name);
    const said = boxes[name], listed = document.getElementById("listed");
    document.getElementById("what").textContent = [said.title, ...said.lines].join(" · ");
    listed.textContent = said.listed.join("\\n");
    listed.hidden = said.listed.length === 0;
    event.stopPropagation();
  });
}
document.addEventListener("click", () => { kept = null; light(null); });
"""


def write_picture(answer: Answer, path: Path) -> None:
    """An `.html` is a page, anything else plain SVG. Nothing in it is fetched from anywhere."""
    graph = graph_of(answer)
    svg = draw_svg(graph, note=f"rollwire audit lineage · {answer.asked} · times in UTC")
    path.write_text(_page(answer, graph, svg) if path.suffix == ".html" else svg, encoding="utf-8")


def _page(answer: Answer, graph: Graph, svg: str) -> str:
    boxes = {
        node.name: {"title": node.title, "lines": node.lines, "listed": node.listed} for node in graph.nodes
    }
    # A "<" within JSON could end the script that holds it.
    data = msgspec.json.encode(boxes).decode().replace("<", "\\u003c")
    return _PAGE.format(
        title=escape(graph.title), svg=svg, report=_report(answer), boxes=data, script=_SCRIPT
    )


def _report(answer: Answer) -> str:
    report = answer.report
    rows = "".join(
        f'<tr><td class="bad">{escape(one.kind)}</td><td>{escape(one.where)}</td><td>{escape(one.detail)}</td></tr>'
        for one in report.findings
    )
    parts = [f"<h2>{len(report.findings):,} findings</h2><table>{rows}</table>"] if rows else []
    parts += [f'<p class="soft">note: {escape(note)}</p>' for note in report.notes]
    counts = ", ".join(f"{count:,} {name}" for name, count in report.checked.items())
    parts.append(f'<p class="soft">looked at {escape(counts)}{"" if rows else "; nothing is amiss"}</p>')
    return "\n".join(parts)
