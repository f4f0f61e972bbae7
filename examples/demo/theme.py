"""Colours of the demo's report and of the README's picture, on a light and on a dark page.

Teal is ragged and amber is padded wherever either is shown; everything else is ink on paper.
"""

from typing import NamedTuple


class Theme(NamedTuple):
    """Colours as `#rrggbb`."""

    paper: str
    panel: str
    ink: str
    muted: str
    rule: str
    ragged: str
    padded: str


LIGHT = Theme("#faf9f7", "#ffffff", "#1f2328", "#5f6670", "#e5e1da", "#0f766e", "#a3520f")
DARK = Theme("#14171a", "#1b1f23", "#e8e6e1", "#9aa2ab", "#31373d", "#4fbfae", "#e6a15c")
