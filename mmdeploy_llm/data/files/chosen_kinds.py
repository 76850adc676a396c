"""ChosenKinds: which kinds of files become items, and what is said of the others."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mmdeploy_llm.data.rows.names import BUILT_IN_KINDS
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import KindTable, PluginManager
from mmdeploy_llm.messages import MEDIA_KINDS
from mmdeploy_llm.values.text.display import listed

from .kinds import PAGED
from .skipped import Skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenKinds:
    """The kinds of files that become items.

    table: the kinds that are known. chosen: those that the caller wants; (): all that the model
        takes. accepted: returns the kinds that the model takes; it is asked only when there is a
        file that is no image, since it reads files of the model. None: nobody knows them.
    leaves_out: why files of other kinds than the chosen ones are no items, and the same in short.
    by_page: whether images of several pages are documents where nothing is chosen.
    """

    table: KindTable = BUILT_IN_KINDS
    chosen: tuple[str, ...] = ()
    accepted: Callable[[], Collection[str]] | None = None
    leaves_out: tuple[str, str] = ("kinds leaves it out", "--kinds")
    by_page: bool = False

    def __post_init__(self) -> None:
        check_kinds(self.chosen, self.table)

    @property
    def words(self) -> str:
        """Names the kinds that are looked for: "image or video"."""
        return listed(self.chosen or self.table.kinds)

    @property
    def takes_pages(self) -> bool:
        """Whether an image of several pages is a document."""
        return PAGED in self.chosen or (self.by_page and not self.chosen)

    def skips(self, kinds: Iterable[str]) -> Callable[[str, str], Skip | None]:
        """Returns what says why a file of a kind is no item, None for one that is.

        kinds: of all files that were found. Raises ConfigError for a chosen kind that the model
        does not take.
        """
        found = {*kinds, *self.chosen}
        is_asked = self.accepted is not None and found - {MEDIA_KINDS[0]}
        accepted = None if not is_asked or self.accepted is None else tuple(self.accepted())
        refused = [] if accepted is None else [own for own in self.chosen if own not in accepted]
        if refused:
            raise ConfigError(
                f"this model takes no {refused[0]}, which kinds asks for; it takes "
                f"{listed(accepted or ('no media',))}"
            )

        def skip(path: str, kind: str) -> Skip | None:
            if self.chosen and kind not in self.chosen:
                return self._skip(path, kind, *self.leaves_out, is_usual=True)
            if accepted is None or kind in accepted:
                return None
            takes = listed(accepted, "and") or "text only"
            reason = f"it is of the kind {kind}, and this model takes {takes}"
            return self._skip(path, kind, reason, f"this model takes no {kind}")

        return skip

    def _skip(
        self, path: str, kind: str, reason: str, hint: str, *, is_usual: bool = False
    ) -> Skip:
        suffix = Path(path).suffix.lower()
        is_named = self.table.of_name(path) == kind
        other = f"{kind} named {suffix}" if suffix else f"{kind} without a suffix"
        label = suffix if is_named else other
        return Skip(path=path, label=label, reason=reason, hint=hint, is_usual=is_usual)


def installed_kinds() -> KindTable:
    """Returns the kinds of all installed plugins."""
    return PluginManager.load().kinds


def check_kinds(kinds: Iterable[str], table: KindTable) -> None:
    """Raises ConfigError for a kind that no plugin provides."""
    for kind in kinds:
        if kind not in table.kinds:
            near = difflib.get_close_matches(kind, table.kinds, n=1)
            known = listed(table.kinds, "and")
            hint = f"did you mean {near[0]!r}?" if near else f"known are {known}"
            raise ConfigError(f"there is no kind of media {kind[:40]!r}; {hint}")


def given_kinds(kinds: str | Iterable[str]) -> Iterator[str]:
    """Yields the kinds of a list, or of a text with commas."""
    for name in kinds.split(",") if isinstance(kinds, str) else kinds:
        if name.strip():
            yield name.strip()
