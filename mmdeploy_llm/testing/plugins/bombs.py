"""Writes archives whose members unpack to far more bytes than they have."""

from __future__ import annotations

import zipfile
from pathlib import Path


def write_bomb(archive: Path, bomb: Path, names: str, num_bytes: int) -> bool:
    """Writes a zip file like another one, in which the members that a text names unpack to so many
    zeros. Returns False where it is no zip file, or the text names none."""
    if not zipfile.is_zipfile(archive):
        return False
    with zipfile.ZipFile(archive) as own:
        found = [it.filename for it in own.infolist() if it.filename in names]
    if not found:
        return False
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as made:
        for name in found:
            with made.open(name, "w") as member:
                for _ in range(num_bytes >> 20):
                    member.write(bytes(2**20))
    return True
