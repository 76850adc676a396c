"""The names that a question about a file may have, and what stands for them.

{sidecar}                 the text beside the file
{text_layer}              the text that a document itself holds
{page} {pages}            of a page: its number, and how many there are
{width} {height}          of a page: the pixels at which it is drawn
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

SIDECAR, TEXT_LAYER = "sidecar", "text_layer"
OF_FILES = (SIDECAR, TEXT_LAYER)
OF_PAGES = (TEXT_LAYER, "width", "height", "page", "pages")
NAME = re.compile(rf"(?<!\{{)\{{({'|'.join((SIDECAR, *OF_PAGES))})\}}(?!\}})")


def names_in(texts: Iterable[str]) -> frozenset[str]:
    """Returns the names that questions have."""
    return frozenset(name for text in texts for name in NAME.findall(text))


def filled(text: str, values: Mapping[str, Any]) -> str:
    """Returns a question with values for its names; names in values stay as they are."""
    return NAME.sub(lambda own: str(values.get(own[1], own[0])), text)
