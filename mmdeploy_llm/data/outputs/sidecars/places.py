"""Finds where a sidecar goes: beside its picture, beneath the input, through no link."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.data.rows.names import BUILT_IN_KINDS, is_media_name, natural_key
from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.hooks import KindTable
from mmdeploy_llm.values.closing import Closing
from mmdeploy_llm.values.text.encodings import is_utf8, not_utf8

MAX_BYTES = 2**20  # of a sidecar that is read
BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A picture: its path `relative` beneath a folder of the input, `root`, or a page of a
    document, by its number."""

    root: str
    relative: str
    page: int | None = None

    @property
    def name(self) -> str:
        """The name of the file."""
        return os.path.basename(self.relative)

    @property
    def stem(self) -> str:
        """The start of the sidecar's name: of `a.b.jpg` it is `a.b`, of a page `a.b.page-3`."""
        own = os.path.splitext(self.name)[0]
        return own if self.page is None else f"{own}.page-{self.page}"

    @property
    def path(self) -> str:
        """The path of the file."""
        return os.path.join(self.root, self.relative)

    @classmethod
    def beneath(cls, root: str | None, path: str, page: int | None = None) -> Spot:
        """Returns the place of a picture, or of a page. root: None for a picture that a program has
        named itself. Raises RequestError when it is not beneath the root."""
        path = os.path.abspath(path)
        root = os.path.dirname(path) if root is None else os.path.abspath(root)
        if os.path.commonpath((root, path)) != root:
            raise RequestError("it is not beneath the folder of the input")
        return cls(root=root, relative=os.path.relpath(path, root), page=page)


@dataclass(slots=True, kw_only=True)
class Beside:
    """An open folder of pictures. owners: of each stem the picture whose sidecar has that name."""

    folder: Folder
    owners: dict[str, str]

    def check_owner(self, spot: Spot, sidecar: str) -> None:
        """Raises RequestError when the sidecar of a picture would be that of another one too, or
        the picture itself."""
        owner = self.owners.get(spot.stem, spot.name)
        if sidecar == spot.name:
            raise RequestError("its sidecar would be the file itself")
        if owner != spot.name:
            raise RequestError(
                f"its sidecar {sidecar!r} is that of {owner!r}; give one of them another name"
            )


class Places(Closing):
    """Opens the folders of pictures, beneath their roots and through no link; the last one stays
    open. kinds: of files that have sidecars."""

    def __init__(self, kinds: KindTable = BUILT_IN_KINDS) -> None:
        self._kinds = kinds
        self._last: tuple[tuple[str, str], Beside] | None = None

    def beside(self, spot: Spot) -> Beside:
        """Opens the folder of a picture. Raises RequestError when it is reached through a link, or
        is not there any more."""
        inner = os.path.dirname(spot.relative)
        if self._last is not None and self._last[0] == (spot.root, inner):
            return self._last[1]
        self.close()
        folder = _opened(spot.root, inner)
        self._last = (
            (spot.root, inner),
            Beside(folder=folder, owners=_owners(folder, self._kinds)),
        )
        return self._last[1]

    def close(self) -> None:
        """Closes the folder that is open."""
        if self._last is not None:
            self._last[1].folder.close()
            self._last = None


def _opened(root: str, inner: str) -> Folder:
    if not os.path.isdir(root):
        raise RequestError("its folder is not there any more")
    folder = Folder.open(Path(root))
    for part in filter(None, inner.split("/")):
        with folder:
            found = None if part == os.pardir else folder.existing(part)
        if found is None:
            raise RequestError("its folder is reached through a link, or is not there any more")
        folder = found
    return folder


def _owners(folder: Folder, kinds: KindTable) -> dict[str, str]:
    """Returns the picture of each stem: of `a.jpg` and `a.png`, both of `a.txt`, the first."""
    owners: dict[str, str] = {}
    names = (name for name in folder.all_names() if is_media_name(name, kinds))
    for name in sorted(names, key=natural_key):
        owners.setdefault(os.path.splitext(name)[0], name)
    return owners


def read_sidecar(spot: Spot, suffix: str, places: Places) -> str:
    """Returns the text of the sidecar beside a picture. Raises RequestError where there is none, or
    one that is no text."""
    name = spot.stem + suffix
    text = text_in(places.beside(spot).folder, name)
    text = text and text.removeprefix(BYTE_ORDER_MARK).strip()
    if not text:
        raise RequestError(f"its sidecar {name!r} is {'missing' if text is None else 'empty'}")
    return text


def text_in(folder: Folder, name: str) -> str | None:
    """Returns the text of a sidecar, its byte order mark included, None when there is none. Raises
    RequestError for anything but a small regular file of UTF-8."""
    try:
        with folder.open_file(name, os.O_RDONLY) as file:
            data = file.read(MAX_BYTES + 1) or b""
    except FileNotFoundError:
        return None
    except (ConfigError, OSError) as error:
        raise RequestError(f"its sidecar cannot be read: {error}") from None
    if len(data) > MAX_BYTES:
        raise RequestError(f"{name!r} has more than {MAX_BYTES} bytes, which is no sidecar's text")
    text = data.decode(errors="surrogateescape")
    if b"\0" in data or not is_utf8(text):
        raise RequestError(f"{name!r} is {not_utf8(data)}")
    return text.strip()


def is_read_only(folder: Folder, name: str) -> bool:
    """Returns whether a file may not be written: nobody may, even if the system lets this user, or
    this user may not."""
    with folder.open_file(name, os.O_RDONLY) as file:
        mode = os.fstat(file.fileno()).st_mode
    is_of_nobody = not mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)
    return is_of_nobody or not os.access(folder.path / name, os.W_OK)
