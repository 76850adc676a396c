"""Checks of a chat part: what the function of a ChatPartSpec makes of parts of messages."""

from __future__ import annotations

import copy
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.hooks import ChatPartSpec, KindTable, MediaRef, PluginManager, hookimpl
from mmdeploy_llm.media.loading.expanding import PartExpander, Placed, is_of
from mmdeploy_llm.testing.models.base import Check, CheckSkipped, demand

PATH = "messages[0].content"
FAILED = "failed on a part of type"  # what PartExpander says of other errors than refusals
ADDRESS = re.compile(r"0x[0-9a-f]{6,}", re.IGNORECASE)
NUM_THREADS = 8
FIRST = 10**6  # a priority: the checked spec comes before the same one where it is installed
TRIED: Mapping[type, Any] = {
    str: "text", int: 1, float: 1.5, bool: True, list: [1], dict: {"a": 1}, object: "text",
}  # fmt: skip
ODD: tuple[Any, ...] = (
    *("", "\0", "a\u202eb\ud800", "x" * 100_000, "../../etc/passwd", "<|im_end|>"),
    *(0, -1, 2**70, -0.5, float("nan"), float("inf"), True, False),
    *([], [None], [[[]]], [{"a": [1]}], ["x"] * 1000, {}, {"": None}, {"a": {"b": []}}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPartExample:
    """A part of a message and what it becomes, texts as they are: `expected` ("At 1.5, 2.",)."""

    part: Mapping[str, Any]
    expected: Sequence[Any]


@dataclass(kw_only=True)
class ChatPartSubject:
    """A chat part to check, and its author's examples.

    wrong: parts that must be refused. others: further specs whose types it may become.
    takes: the kinds of media that the model takes. files: path or URL -> bytes, for late parts.
    """

    spec: ChatPartSpec
    examples: Sequence[ChatPartExample] = ()
    wrong: Sequence[Mapping[str, Any]] = ()
    others: Sequence[ChatPartSpec] = ()
    takes: tuple[str, ...] = ("image", "video")
    files: Mapping[str, bytes] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> KindTable:
        """The table of the installed plugins, with the specs in front."""
        manager = PluginManager.load()
        specs = [replace(own, priority=FIRST) for own in (self.spec, *self.others)]
        plugin = SimpleNamespace(provide_chat_parts=hookimpl(lambda: specs))
        manager.register(plugin, f"chat part {self.spec.name}")
        return manager.kinds

    def expander(self, takes: tuple[str, ...] | None = None) -> PartExpander:
        """Builds what an engine has for its messages."""
        model = next(iter(self.spec.models))
        chosen = self.takes if takes is None else takes
        return PartExpander(self.kinds, model=model, takes=chosen, fetch=self._fetch)

    def _fetch(self, ref: MediaRef, _: object) -> bytes:
        if ref.uri not in self.files:
            raise RequestError(f"there is no file {ref.uri[:80]!r}")
        return self.files[ref.uri]

    def expand(self, part: Mapping[str, Any], expander: PartExpander | None = None) -> list[Any]:
        """Returns what a part becomes in the end. Raises RequestError."""
        placed = [Placed(part=part, path=f"{PATH}[0]")]
        return [own.part for own in (expander or self.expander()).expanded(placed)]

    @cached_property
    def parts(self) -> list[Mapping[str, Any]]:
        """Parts that are written: the examples', else one made up from the spec's keys."""
        given = [example.part for example in self.examples]
        made = {key: TRIED[own] for key, own in self.spec.keys.items()}
        for part in given or [{"type": name, **made} for name in self.spec.types]:
            try:
                self.expand(part)
            except RequestError as error:
                if given:
                    demand(False, f"{part!r:.200} is refused: {error}; correct it or the example")
                raise CheckSkipped(
                    f"{part!r:.100} was tried and refused ({error}); add parts to `examples`"
                ) from None
        return given or [{"type": name, **made} for name in self.spec.types]

    def varied(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yields (key, part) for parts in which one key has an odd value of its type."""
        for part in self.parts:
            for key, own in {**self.spec.keys, **self.spec.optional}.items():
                for value in ODD if key != "*" else ():
                    if is_of(value, own):
                        yield key, {**part, key: value}

    def shortened(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yields (key, part) for the parts without one of the keys that they may leave out."""
        for part in self.parts:
            for key in {*self.spec.optional} & {*part}:
                yield key, {name: value for name, value in part.items() if name != key}


def examples_hold(subject: ChatPartSubject) -> None:
    """The author's examples become what they say."""
    if not subject.examples:
        raise CheckSkipped("no examples were given; add some to `examples`")
    demand(subject.parts, "unreachable")
    for example in subject.examples:
        found = subject.expand(example.part)
        wanted = [
            {"type": "text", "text": own} if isinstance(own, str) else own
            for own in example.expected
        ]
        demand(
            found == wanted,
            f"{example.part!r:.200} becomes {found!r:.300}, but the example says {wanted!r:.300}; "
            "correct the function or the example",
        )


def wrong_parts_are_refused(subject: ChatPartSubject) -> None:
    """The author's wrong parts are refused with a message that says why."""
    if not subject.wrong:
        raise CheckSkipped("no wrong parts were given; add some to `wrong`")
    for part in subject.wrong:
        try:
            found = subject.expand(part)
        except RequestError as error:
            said = str(error).partition(": ")[2]
            demand(said.strip(), f"{part!r:.200} is refused without a message; say what is allowed")
            demand(FAILED not in said, f"{said}; raise ValueError saying what is allowed")
            continue
        demand(False, f"{part!r:.200} becomes {found!r:.200}; raise ValueError for it")


def odd_values_work_or_are_refused(subject: ChatPartSubject) -> None:
    """Odd values of the declared types become parts or are refused; nothing else is raised."""
    expander = subject.expander()
    for key, part in subject.varied():
        try:
            subject.expand(part, expander)
        except RequestError as error:
            demand(
                FAILED not in str(error),
                f"with {part[key]!r:.80} as {key!r}: {error}; check the value and raise ValueError",
            )


def parts_are_of_known_types(subject: ChatPartSubject) -> None:
    """A part ends as texts and media: of types that any engine knows."""
    for part in subject.parts:
        for own in subject.expand(part):
            name = own["type"]
            kind = name.removesuffix("_url")
            demand(
                name == "text" or kind in subject.kinds.kinds or subject.kinds.of_part(name),
                f"{part!r:.200} becomes a part of type {name!r}, which nobody knows; write a text, "
                f"or media of one of {', '.join(subject.kinds.kinds)}",
            )
            demand(
                name != "text" or isinstance(own.get("text"), str),
                f"{part!r:.200} becomes a text part without a text, {own!r:.200}",
            )


def the_same_part_becomes_the_same(subject: ChatPartSubject) -> None:
    """A part becomes equal parts each time, in another engine too."""
    first, second = subject.expander(), subject.expander()
    for part in subject.parts:
        for expander in (first, second):
            demand(
                _is_equal(subject.expand(part, first), subject.expand(part, expander)),
                f"{part!r:.200} becomes other parts the next time; use nothing but the part: no "
                "clock, no chance, no counter",
            )


def every_key_has_an_effect(subject: ChatPartSubject) -> None:
    """Parts that differ become parts that differ, so that no cache takes one for the other."""
    expander = subject.expander()
    base = [subject.expand(part, expander) for part in subject.parts]
    has_effect: dict[str, bool] = {}  # of the keys for which some value was not refused
    for key, part in (*subject.varied(), *subject.shortened()):
        if key in part and part[key] in [own.get(key) for own in subject.parts]:
            continue
        try:
            found = subject.expand(part, expander)
        except RequestError:
            if key not in part:
                has_effect[key] = True
            continue
        differs = not any(_is_equal(found, own) for own in base)
        has_effect[key] = has_effect.get(key, False) or differs
    without = [key for key, has in has_effect.items() if not has]
    demand(
        not without,
        f"{', '.join(sorted(without))}: no value of these keys changes what a part becomes; use "
        "them or leave them out of the spec",
    )


def parts_are_left_as_they_are(subject: ChatPartSubject) -> None:
    """The function changes neither the part nor what is inside of it."""
    expander = subject.expander()
    for part in subject.parts:
        before = copy.deepcopy(dict(part))
        subject.expand(part, expander)
        demand(
            _is_equal(dict(part), before),
            f"the function changed its part from {before!r:.200} to {dict(part)!r:.200}; change a "
            "copy: the caller may use it again",
        )


def threads_do_not_disturb_each_other(subject: ChatPartSubject) -> None:
    """Eight threads that write parts at once get what one gets."""
    expander = subject.expander()
    alone = [subject.expand(part, expander) for part in subject.parts]
    barrier = threading.Barrier(NUM_THREADS)

    def run(number: int) -> list[tuple[int, list[Any]]]:
        barrier.wait()
        turns = [(number + turn) % len(alone) for turn in range(max(NUM_THREADS, len(alone)))]
        return [(index, subject.expand(subject.parts[index], expander)) for index in turns]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            found = [each for own in pool.map(run, range(NUM_THREADS)) for each in own]
    finally:
        sys.setswitchinterval(interval)
    wrong = next((index for index, own in found if not _is_equal(own, alone[index])), None)
    demand(
        wrong is None,
        f"of eight threads one got other parts for {subject.parts[wrong or 0]!r:.200}; keep "
        "nothing in the module or in attributes while a part is written",
    )


def it_depends_on_the_part_alone(subject: ChatPartSubject) -> None:
    """A part that is not `late` becomes the same for every model."""
    if subject.spec.late:
        raise CheckSkipped("the spec says late=True")
    text_only, all_kinds = subject.expander(()), subject.expander(subject.kinds.kinds)
    for part in subject.parts:
        demand(
            _is_equal(subject.expand(part, text_only), subject.expand(part, all_kinds)),
            f"{part!r:.200} becomes other parts for another model; say late=True",
        )


def files_are_opened_by_fetch(subject: ChatPartSubject) -> None:
    """The function opens no file that a part names: `about.fetch` keeps to the limits and to
    allowed_media_root."""
    expander = subject.expander()
    for part in subject.parts:
        names = {text for text in _texts(part) if text}
        with _Opened() as opened:
            subject.expand(part, expander)
        found = [path for path in opened.paths if any(path.endswith(name) for name in names)]
        demand(
            not found,
            f"the function opened {found[:1]} itself, wherever that is; say late=True and read it "
            "with about.fetch(...)",
        )


def messages_show_no_addresses(subject: ChatPartSubject) -> None:
    """Neither texts nor messages of errors have addresses of objects, which differ each time."""
    expander = subject.expander()
    said: list[str] = []
    for part in (*subject.parts, *subject.wrong, *(part for _, part in subject.varied())):
        try:
            made = subject.expand(part, expander)
        except RequestError as error:
            said.append(str(error))
            continue
        said += [text for own in made for text in _texts(own)]
    found = next((text for text in said if ADDRESS.search(text) and " at 0x" in text), None)
    demand(found is None, f"an object's address is told: {found!r:.200}; name its type instead")


CHECKS: tuple[Check, ...] = (
    examples_hold,
    wrong_parts_are_refused,
    odd_values_work_or_are_refused,
    parts_are_of_known_types,
    the_same_part_becomes_the_same,
    every_key_has_an_effect,
    parts_are_left_as_they_are,
    threads_do_not_disturb_each_other,
    it_depends_on_the_part_alone,
    files_are_opened_by_fetch,
    messages_show_no_addresses,
)


class _Opened:
    """Collects the paths that are opened while it is entered, from any thread."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def __enter__(self) -> _Opened:
        _listeners().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _listeners().remove(self)


@cache
def _listeners() -> list[_Opened]:
    """Returns those who listen; Python cannot take a hook away again, so there is one."""
    listeners: list[_Opened] = []

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and listeners and isinstance(arguments[0], str):
            for own in listeners:
                own.paths.append(arguments[0])

    sys.addaudithook(heard)
    return listeners


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for own in value.values() for text in _texts(own)]
    if isinstance(value, (list, tuple)):
        return [text for own in value for text in _texts(own)]
    return []


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two parts are equal; media are compared by what they are, not by `==`, which arrays
    have of their own."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if hasattr(one, "tobytes") and hasattr(other, "tobytes"):
        return type(one) is type(other) and bool(one.tobytes() == other.tobytes())
    return bool(one == other)
