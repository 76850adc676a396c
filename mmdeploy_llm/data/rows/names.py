"""Names of files: media, URLs, and their natural order."""

from __future__ import annotations

import os
import re

from mmdeploy_llm.hooks import KindTable
from mmdeploy_llm.hooks.kinds import table_of
from mmdeploy_llm.messages import MediaRef

BUILT_IN_KINDS = table_of(())  # the kinds that are known without any plugin


def is_url(name: str) -> bool:
    """Returns whether the name of a media item or a corpus is a URL rather than a path."""
    return bool(MediaRef(kind="", uri=name).scheme)


def is_media_name(name: str, kinds: KindTable) -> bool:
    """Returns whether a folder or glob yields a file of this name, which is of one of the kinds."""
    return is_visible(name) and kinds.of_name(name) is not None


def is_visible(name: str) -> bool:
    """Returns whether a folder shows a file of this name."""
    return not os.path.basename(name).startswith(".")


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Returns a sort key: digits compare by value, letters ignore case, ties go by the name."""
    chunks = re.split(r"(\d+)", name.casefold())
    # Digits are at odd indices, so text is compared with text and numbers with numbers.
    return [int(chunk) if index % 2 else chunk for index, chunk in enumerate(chunks)], name
