"""Media in the folder that SHELF_FOLDER names, shelf://name."""

import os
from dataclasses import replace
from pathlib import Path

from mmdeploy_llm.media import read_beneath


def read(ref, limits):
    root = Path(os.environ.get("SHELF_FOLDER", "."))
    path = root / ref.uri.strip().partition("://")[2]
    return read_beneath(path, replace(limits, allowed_root=root), name=ref.uri)
