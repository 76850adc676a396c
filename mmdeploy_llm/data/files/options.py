"""The options of what a batch reads of a folder, for all doors: commands and Python."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmdeploy_llm.data.outputs.scan import Mode
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import KindTable

from .chosen_kinds import ChosenKinds, given_kinds, installed_kinds
from .contents import Reader, check_dedupe
from .files import check_animated
from .names import Patterns
from .page_choice import PageChoice
from .skipped import Skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingOptions:
    """Which files of an input are read; see FindingArguments.

    table: the kinds of media; None: those of all installed plugins. accepted: returns those that
        the model takes, see ChosenKinds. open_reader: returns what reads images within the limits
        of the engine. pages: whether pages of documents are items. new_source: builds the source of
        files, with the arguments of FileSource; None: FileSource.
    """

    exclude: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    animated: str | None = None  # as "image"
    skipped: Path | None = None
    prune: bool = False
    dedupe: str | None = None
    table: KindTable | None = None
    accepted: Callable[[], Collection[str]] | None = None
    open_reader: Callable[[], Reader] | None = None
    pages: PageChoice = field(default_factory=PageChoice)
    new_source: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_animated(self.how_animated)
        check_dedupe(self.dedupe)
        Patterns(self.exclude)

    @classmethod
    def given(cls, arguments: Mapping[str, Any]) -> FindingOptions:
        """Returns the options of FindingArguments and PageArguments. Raises ConfigError for wrong
        ones."""
        values = dict(arguments)
        pages = PageChoice.taken(values)
        exclude = values.pop("exclude", None) or ()
        patterns = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise ConfigError("exclude must be a pattern such as '*.tmp', or a list of patterns")
        listed = values.pop("skipped", None)
        kinds = values.pop("kinds", None)
        chosen = () if kinds is None else tuple(given_kinds(kinds))
        if kinds is not None and not chosen:
            raise ConfigError("kinds names no kind of media; leave it out to read all of them")
        return cls(
            exclude=patterns,
            kinds=chosen,
            skipped=None if listed is None else Path(listed),
            pages=pages,
            **values,
        )

    @property
    def how_animated(self) -> str:
        """The kind that images of several frames are of."""
        return "image" if self.animated is None else self.animated

    def wanted(self) -> ChosenKinds:
        """Returns the kinds of files that become items. Raises ConfigError for an unknown one."""
        table = installed_kinds() if self.table is None else self.table
        by_page = self.pages.by_page
        return ChosenKinds(table=table, chosen=self.kinds, accepted=self.accepted, by_page=by_page)

    def check(self, mode: Mode, skipped: Skipped, *, is_corpus: bool) -> None:
        """Raises ConfigError for options that would have no effect, and where the list of what is
        skipped cannot be written."""
        if self.prune and mode != "resume":
            raise ConfigError("prune needs resume: a new output has no records to remove")
        if self.skipped is not None:
            skipped.check_target(self.skipped)
        is_default = not (self.exclude or self.kinds or self.prune) and self.animated is None
        if (not is_default or self.pages.by_page) and is_corpus:
            raise ConfigError(
                "exclude, kinds, animated, by_page and prune are for folders and files of media; "
                "this input is a corpus"
            )

    def values(self) -> dict[str, Any]:
        """Returns what decides answers, where it is not the default."""
        animated = {} if self.how_animated == "image" else {"animated": self.animated}
        return {**animated, **self.pages.values()}
