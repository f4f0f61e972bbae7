"""Draw the picture of the README from the measured table, and those of docs/viz.md: python docs/tools/make_picture.py

One training step of a stock encoder, padded and packed, at three fillings: time for each, memory where it is measured.
Two files, for a light and a dark page, of the colours that the demo's report has. The pictures of docs/viz.md are those
of its examples, by `tdc.viz`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import tdc  # noqa: E402 - of the checkout
import tdc.viz  # noqa: E402
from examples.demo.theme import DARK, LIGHT, Theme  # noqa: E402

TABLE = ROOT / "bench" / "results" / "bench_default.json"
FOLDER = ROOT / "docs" / "_static"
NAMES = {"step.svg": LIGHT, "step-dark.svg": DARK}
WIDTH, HEIGHT, LEFT, RIGHT = 720, 262, 120, 110
Bar = tuple[str, float, str]  # "padded" or "tdc", part of the longest, figure


def bars(table: Any) -> list[tuple[str, list[Bar]]]:
    """Groups of bars: seconds of the compiled step at each filling, and MB of the emptiest."""
    rows = {row["row"]: row for row in table["rows"]}
    found = []
    for filling in ("20%", "35%", "77%"):
        row = rows[f"compiled training at {filling}"]
        seconds = {name: row["candidates"][name]["us"]["median"] / 1e6 for name in ("padded", "tdc")}
        found.append((f"{filling} is real", scaled(seconds, "s")))
    row = rows["compiled training at 20%"]
    found.append(("memory at 20%", scaled({name: row[f"MB {name}"] for name in ("padded", "tdc")}, "MB")))
    return found


def scaled(figures: dict[str, float], unit: str) -> list[Bar]:
    most = max(figures.values())
    return [(name, figure / most, f"{figure:.3g} {unit}") for name, figure in figures.items()]


def svg(table: Any, theme: Theme) -> str:
    """The picture as text."""
    colours = {"padded": theme.padded, "tdc": theme.ragged}
    title = "A training step of a stock transformer encoder, compiled: padded and packed"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
        f'<g font-family="system-ui, sans-serif" font-size="13" fill="{theme.ink}">',
        f'<text x="0" y="16" font-weight="600">{title}</text>',
    ]
    y = 34
    for label, group in bars(table):
        parts.append(f'<text x="{LEFT - 12}" y="{y + 23}" text-anchor="end" fill="{theme.muted}">{label}</text>')
        for name, part, figure in group:
            width = max(2, round(part * (WIDTH - LEFT - RIGHT)))
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{width}" height="20" rx="2" fill="{colours[name]}"/>')
            text = f"{figure} {name}"
            parts.append(f'<text x="{LEFT + width + 6}" y="{y + 15}">{text}</text>')
            y += 23
        y += 10
    return "\n".join([*parts, "</g>", "</svg>", ""])


def examples() -> dict[str, Any]:
    """The figures of docs/viz.md, by file."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(500, generator=generator).add(4).exp().clamp(1, 512).long()
    torch.manual_seed(0)
    x = tdc.pack([torch.randn(n, 8) for n in (5, 2, 0, 9)])
    td = tdc.TensorDict({"x": x, "obs": {"now": torch.zeros(4, 8), "last": torch.zeros(4)}}, [4])
    return {
        "viz-lengths.svg": tdc.viz.lengths(sizes, batch_size=32),
        "viz-batch.svg": tdc.viz.batch(x),
        "viz-attention.svg": tdc.viz.attention((x * 2 @ x.transpose(1, 2)).softmax(2)),
        "viz-tree.svg": tdc.viz.tree(td.set("view", td["obs", "now"][:, 0])),
    }


def main() -> None:
    with matplotlib.rc_context({"svg.hashsalt": "tdc"}):
        for name, figure in examples().items():
            figure.savefig(FOLDER / name, metadata={"Date": None})
            print(f"wrote docs/_static/{name}")
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    for name, theme in NAMES.items():
        (FOLDER / name).write_text(svg(table, theme), encoding="utf-8")
        print(f"wrote docs/_static/{name}")


if __name__ == "__main__":
    main()
