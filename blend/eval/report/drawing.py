"""Plots as inline SVG: drawn by matplotlib, coloured by the page, so that one drawing serves light and dark."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import cycle
from typing import TYPE_CHECKING, Any, TypeAlias
from xml.etree import ElementTree as ET

from markupsafe import Markup

from blend.errors import InvalidInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Dashes: TypeAlias = "str | tuple[int, tuple[int, ...]]"

WIDTH = 4.8
"""Width of a plot in inches, narrow enough for its letters to be read on a phone."""

INK, LINE, PAPER = "#010203", "#010204", "#010205"
"""Colours of text, of frames and of the ground as matplotlib is told them; the style sheet gives them their values."""

HUES = ("#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#f0e442")
"""The colours of Okabe and Ito (2008) without black, yellow last, for it is faint on white."""

HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "||||", "oo", "----")

_VARIABLES = {INK: "--ink", LINE: "--line", PAPER: "--paper"} | {hue: f"--hue-{i}" for i, hue in enumerate(HUES)}
_COLOUR = re.compile("|".join(_VARIABLES))
_LONGEST = 32  # characters of a label
_NUMERIC = ("d", "x", "y", "transform", "points")
_LONG = re.compile(r"-?\d+\.\d{3,}")  # more decimals than a screen shows
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it is searched and selected
    "text.parse_math": False,  # labels hold names that people chose
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LINE,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.6,
    "hatch.color": INK,
    "hatch.linewidth": 0.5,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": "none",
}


@dataclass(frozen=True)
class Look:
    """How a method is told from others: by marker, dashes and hatch, and by colour for those who see it."""

    colour: str
    marker: str
    dashes: Dashes
    hatch: str


@dataclass(frozen=True)
class Plot:
    """A drawing and what it shows, in words."""

    title: str
    summary: str
    svg: Markup


_MARKERS = "oDs^vPX<>phd8"
_DASHES: tuple[Dashes, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_KNOWN = "query deviation prefix reuse head random oracle deviation-released closed-book auto".split()


def looks(names: Iterable[str]) -> Mapping[str, Look]:
    """Return the look of each method or series. The methods that ship look the same on every page, full prefill is
    drawn in ink."""
    order = dict.fromkeys([*_KNOWN, *sorted({*names} - {*_KNOWN, "full"})])
    ways = zip(cycle(HUES), cycle(_MARKERS), cycle(_DASHES), cycle(HATCHES), strict=False)
    found = {name: Look(*way) for name, way in zip(order, ways, strict=False)}
    return {**found, "full": Look(INK, "*", (0, (1, 1)), "")}


def plot(key: str, title: str, summary: str, draw: Callable[[Figure], None], *, height: float = 3.4) -> Plot:
    """Draw on a figure of :data:`WIDTH` × ``height`` inches.

    Args:
        key: begins every id of the drawing; no other drawing of the page may have it.
        title: names the drawing.
        summary: what it shows, for those who do not see it.
        draw: puts axes on the figure.

    Raises:
        InvalidInput: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        allowed = "with the extra: pip install 'blendkv[eval]'"
        raise InvalidInput("report", f"no package matplotlib ({error})", allowed) from error
    written = BytesIO()
    with rc_context({**_SETTINGS, "svg.hashsalt": key}), warnings.catch_warnings():
        # Letters of scripts that the measuring font lacks: the reader's browser has them.
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure = Figure((WIDTH, height), layout="constrained")
        draw(figure)
        # Laid out here, it is drawn once; left to itself, matplotlib draws it a second time to lay it out.
        layout = figure.get_layout_engine()
        if layout is not None:
            layout.execute(figure)
        figure.set_layout_engine("none")
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", metadata=metadata)
    return Plot(title, summary, _inline(written.getvalue(), key, f"{title}. {summary}"))


def short(label: str) -> str:
    """Return a label that leaves room for the plot; names that people chose may be of any length."""
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"


def legend(figure: Figure, axes: Axes, columns: int = 3) -> None:
    """Put the legend of ``axes`` below the plot, if there is anything to tell apart."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _inline(document: bytes, key: str, label: str) -> Markup:
    """Return an SVG document as an element of an HTML page: ids of its own, the page's colours, and a label."""
    root = ET.fromstring(document)
    for parent in root.iter():
        for child in list(parent):
            # matplotlib's style element would hold for the whole page, and its metadata names outer addresses.
            if child.tag.rpartition("}")[2] in ("style", "metadata"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        if "id" in attributes:
            attributes["id"] = f"{key}-{attributes['id']}"
        for name, value in attributes.items():
            if name == "href" and value.startswith("#"):
                value = f"#{key}-{value[1:]}"
            value = value.replace("url(#", f"url(#{key}-")
            if name in _NUMERIC:
                value = _LONG.sub(lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), value)
            attributes[name] = _COLOUR.sub(lambda found: f"var({_VARIABLES[found[0]]})", value)
        element.attrib = attributes
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"role": "img", "aria-label": label}
    # Safe: ElementTree escapes all text and attributes.
    return Markup(ET.tostring(root, encoding="unicode"))
