"""Names that are left out of folders: files of systems and storage boxes, and --exclude."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

from mmdeploy_llm.errors import ConfigError

MAX_SHOWN = 80

# Written by systems, not by people. In small letters, for files and folders alike.
_SYSTEM = frozenset(
    (
        *("@eadir", "@tmp", "@recycle", "@recently-snapshot", "#recycle", "#snapshot"),  # NAS
        *("$recycle.bin", "system volume information", "found.000"),  # Windows
        *("thumbs.db", "ehthumbs.db", "desktop.ini"),
        *("__macosx", ".ds_store", ".appledouble", ".lsoverride", ".trashes", ".fseventsd"),
        *(".spotlight-v100", ".documentrevisions-v100", ".temporaryitems", "icon\r"),  # macOS
        *(".git", ".hg", ".svn", "__pycache__"),
        *(".thumbnails", ".trash", "lost+found", ".directory"),
        *("~snapshot", ".snapshot", ".zfs", ".snapshots"),
    )
)
# Begin or end of names; the label says which.
_BEGINS = (
    ("._", "._*"),
    (".trash-", ".Trash-*"),
    (".nfs", ".nfs*"),
    ("synofile_thumb", "SYNO*"),
    ("synophoto_thumb", "SYNO*"),
    ("~$", "~$*"),
)
_ENDS = (("@synoeastream", "*@SynoEAStream"), ("@synoresource", "*@SynoResource"))


def system_name(name: str) -> str | None:
    """Returns the name or pattern under which a file or folder of a system is left out, else
    None."""
    lower = name.lower()
    if lower in _SYSTEM:
        return name.rstrip("\r")
    begin = next((label for begin, label in _BEGINS if lower.startswith(begin)), None)
    return begin or next((label for end, label in _ENDS if lower.endswith(end)), None)


class Patterns:
    """The patterns of --exclude. One without "/" is compared with the name of each file and folder,
    another one with the path beneath the folder or glob that is read: `*` is a part of a name, `**`
    any folders. One that ends in "/" fits folders only.

    Raises ConfigError for a pattern that can fit nothing.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        if isinstance(patterns, str):
            patterns = (patterns,)
        self._rules: dict[str, Sequence[str]] = {}
        for pattern in patterns:
            fixed = pattern.removeprefix("./").rstrip("/")
            if not fixed.strip("/") or pattern.startswith(("/", "../")):
                raise ConfigError(
                    f"exclude {pattern[:MAX_SHOWN]!r} fits nothing: give a name such as '*.tmp', "
                    "or a path beneath the input such as 'drafts/**'"
                )
            self._rules[pattern] = fixed.split("/")
        self._used: set[str] = set()

    def match(self, relative: str, *, is_folder: bool) -> str | None:
        """Returns the first pattern that fits a file or folder, else None. relative: its path
        beneath the folder that is read."""
        names = relative.split("/")
        for pattern, wanted in self._rules.items():
            path = names if len(wanted) > 1 else names[-1:]
            if (is_folder or not pattern.endswith("/")) and _fits(path, wanted):
                self._used.add(pattern)
                return pattern
        return None

    @property
    def unused(self) -> tuple[str, ...]:
        """The patterns that have fitted nothing so far."""
        return tuple(pattern for pattern in self._rules if pattern not in self._used)


def _fits(names: Sequence[str], wanted: Sequence[str]) -> bool:
    """Compares a path with a pattern, name by name."""
    if not wanted or not names:
        return not wanted and not names
    if wanted[0] != "**":
        return fnmatch.fnmatchcase(names[0], wanted[0]) and _fits(names[1:], wanted[1:])
    # At the end `**` stands for at least one name, elsewhere for any number of folders.
    return len(wanted) == 1 or any(_fits(names[at:], wanted[1:]) for at in range(len(names)))
