"""Templates, and how text and numbers are shown in them."""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tstore.core.format.plain_text import format_size
from tstore.service.page.distributions import exponent_plot, heat_image, value_plot
from tstore.service.page.plots import bars, line, treemap

__all__ = ["asset", "load_templates", "render", "visible"]

LONGEST = 160
"""The maximum characters of a text on a page; JSON has all."""

_LONGEST_INTEGER = 10**12  # larger integers are not shown with all digits

_SEPARATORS = re.compile(r"([/._])(?=[^<>]*</bdi>)")  # in the text of an element, but not in its tags

_ASSETS = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}


def visible(text: object, longest: int = LONGEST) -> str:
    """Return a text on one line, with control and formatting characters escaped, and its middle cut if it is long.

    Overrides of the direction of text are formatting characters, so no text can change how its surroundings are
    read.
    """
    string = str(text)
    if len(string) > longest:
        kept = longest * 2 // 3
        string = f"{string[:kept]}…{string[kept - longest + 1 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in string)


def _text(text: object, longest: int = LONGEST) -> Markup:
    """Return a text from a store as HTML: isolated from the direction of the text around it."""
    string = str(text)
    shown = visible(string, longest)
    if len(string) <= longest:
        return Markup("<bdi>{}</bdi>").format(shown)
    return Markup('<bdi title="{:,} characters; JSON has all">{}</bdi>').format(len(string), shown)


def _path(path: str) -> Markup:
    """Return a path as HTML that may wrap after each of its separators."""
    return Markup(_SEPARATORS.sub(r"\1<wbr>", str(_text(path))))


def format_number(value: float | None) -> str:
    """Format a metric with four significant digits, integers with all unless there are many."""
    if value is None:
        return "–"
    if isinstance(value, int) and abs(value) < _LONGEST_INTEGER:
        return f"{value:,}"
    return f"{value:.4g}" if math.isfinite(value) else {"nan": "NaN", "inf": "∞", "-inf": "−∞"}[str(value)]


def format_bound(value: float) -> str:
    """Format the end of a range with three significant digits."""
    return format_number(value if isinstance(value, int) else float(f"{value:.3g}"))


def format_percent(share: float | None) -> str:
    """Format a share of 1 in percent with two significant digits, 100 % and more without a fraction."""
    if share is None:
        return "not finite"
    percent = 100 * share
    return f"{percent:,.0f} %" if percent >= 9.95 or not percent else f"{percent:#.2g} %"


def format_sides(lengths: Sequence[int]) -> str:
    """Format a shape, such as "1,328 × 384"."""
    return " × ".join(f"{n:,}" for n in lengths) or "scalar"


def tile_label(name: str) -> tuple[str, str]:
    """Return the end of a path, at most two names, and the rest; dots separate names as slashes do."""
    for separator in "/.":
        names = name.split(separator)
        if len(names) > 1:
            return separator.join(names[-2:]), separator.join(names[:-2])
    return name, ""


def format_seconds(seconds: float | None) -> str:
    """Format a duration with one or two units."""
    if seconds is None:
        return "–"
    if abs(seconds) < 0.95:
        return f"{1000 * seconds:.0f} ms"
    if abs(seconds) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def format_age(seconds: float) -> str:
    """Format how long ago something was, in the largest unit."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length):,} {unit}"
    return f"{int(seconds)} s"


@functools.cache
def asset(name: str) -> tuple[bytes, str, str] | None:
    """Return the bytes, the type and the digest of a static file, None if there is no such file."""
    if name not in _ASSETS:
        return None
    data = files("tstore.service.page").joinpath("static", name).read_bytes()
    return data, _ASSETS[name], hashlib.sha256(data).hexdigest()[:16]


def _asset_url(name: str) -> str:
    found = asset(name)
    assert found is not None
    return f"/-/page/static/{name}?{found[2]}"


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tstore.service.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "age": format_age,
        "text": _text,
        "size": format_size,
        "bound": format_bound,
        "path": _path,
        "percent": format_percent,
        "number": format_number,
        "seconds": format_seconds,
        "sides": format_sides,
        "tile_label": tile_label,
        "visible": visible,
    }
    environment.globals |= {"asset": _asset_url, "line": line, "bars": bars, "treemap": treemap}
    environment.globals |= {"value_plot": value_plot, "exponent_plot": exponent_plot, "heat_image": heat_image}
    return environment


def load_templates() -> None:
    """Compile all templates."""
    for name in _environment().list_templates():
        _environment().get_template(name)


def render(template: str, **values: Any) -> str:
    """Return a template as HTML."""
    return _environment().get_template(template).render(**values)
