"""For `make site`: equations become MathML, which browsers draw without a script."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

DISPLAYED, INLINE = re.compile(r"\$\$(.+?)\$\$", re.S), re.compile(r"(?<![\\$`])\$([^$`\n]+?)\$(?!\d)")
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.S)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace what stands between dollars, outside of code."""
    parts = CODE.split(markdown)
    return "".join(part if index % 2 else render(part) for index, part in enumerate(parts))


def render(text: str) -> str:
    """The text with MathML for TeX."""
    text = DISPLAYED.sub(lambda found: convert(found[1].strip(), display="block"), text)
    return INLINE.sub(lambda found: convert(found[1]), text)
