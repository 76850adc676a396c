"""Placeholders: where media stand in a prompt, and how many tokens each of them takes there.

text  "Picture 1:<|image@placeholder|>"   markers of any processor
  --> "Picture 1:<|IMAGE_PLACEHOLDER|>"   one placeholder token each     (in_text)
  --> [.., 100295]                        tokenized as a whole           (the tokenizer)
  --> [.., 100295, 100295, 100295, ..]    num_tokens of them             (expand)

Where more than placeholder tokens stands for an item (its prompt_text), a text prompt takes that
before it is tokenized (fill, locate), since the tokens at its ends may join those beside them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mmdeploy_llm.errors import CheckpointError, MediaError
from mmdeploy_llm.hooks import MediaInput, MediaProcessor, MediaSpan

from .tokenizer import PromptTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """A prompt's final token ids and the places of its media in them, in order."""

    ids: list[int]
    spans: tuple[MediaSpan, ...]


class Placeholders:
    """The markers and placeholder ids of all processors of a model.

    Raises CheckpointError when the tokenizer has no token for a processor's placeholder.
    """

    def __init__(
        self, processors: Mapping[str, MediaProcessor], tokenizer: PromptTokenizer
    ) -> None:
        self._kinds: dict[int, str] = {}  # placeholder id -> kind
        self._aliases: dict[tuple[int, ...], int] = {}  # ids of another marker -> placeholder id
        self._tokens: dict[str, str] = {}  # marker -> placeholder token
        self._kind_of: dict[str, str] = {}  # placeholder token -> kind
        for kind, processor in processors.items():
            self._add(kind, processor, tokenizer)
        texts = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None

    @property
    def markers(self) -> tuple[str, ...]:
        """Every text that stands for a media item."""
        return tuple(self._tokens)

    def in_text(self, text: str) -> str:
        """`text` with every marker as its placeholder token."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: self._tokens[found[0]], text)

    def in_ids(self, ids: Sequence[int]) -> list[int]:
        """`ids` with every marker that consists of tokens of its own as its placeholder's id."""
        found: list[int] = []
        lengths = sorted({len(alias) for alias in self._aliases}, reverse=True)
        start = 0
        while start < len(ids):
            pieces = (tuple(ids[start : start + length]) for length in lengths)
            alias = next((piece for piece in pieces if piece in self._aliases), None)
            found.append(ids[start] if alias is None else self._aliases[alias])
            start += 1 if alias is None else len(alias)
        return found

    def check_counts(self, ids: Sequence[int], num_items: Mapping[str, int]) -> None:
        """Refuses what cannot match, before anything is opened: media without a place, places
        without media. More places than items may yet be items written out in full.

        Raises MediaError with both numbers.
        """
        places = Counter(self._kinds[token_id] for token_id in ids if token_id in self._kinds)
        for kind in sorted(set(self._kinds.values())):
            found, given = places[kind], num_items.get(kind, 0)
            if found < given or (found and not given):
                raise MediaError(_mismatch(kind, found, given))

    def fill(self, texts: Sequence[str], media: Sequence[MediaInput]) -> list[str]:
        """`texts` with what stands for the i-th item of a kind in place of its i-th marker.

        Raises MediaError when markers and items do not match, either way.
        """
        kinds = tuple(self._kind_of.values())
        queues = {kind: [item for item in media if item.kind == kind] for kind in kinds}
        found = Counter[str]()

        def text_of(match: re.Match[str]) -> str:
            token = self._tokens[match[0]]
            kind = self._kind_of[token]
            found[kind] += 1
            if found[kind] > len(queues[kind]):
                return token
            item = queues[kind][found[kind] - 1]
            return token * item.num_tokens if item.prompt_text is None else item.prompt_text

        assert self._pattern is not None, "there are media, so there is a processor"
        filled = [self._pattern.sub(text_of, text) for text in texts]
        for kind, queue in queues.items():
            if found[kind] != len(queue):
                raise MediaError(_mismatch(kind, found[kind], len(queue)))
        return filled

    def locate(self, ids: Sequence[int], media: Sequence[MediaInput]) -> Expanded:
        """The places of `media` in ids where all of them are written out.

        Raises MediaError when there are more or fewer placeholder ids than they have tokens.
        """
        places: dict[str, list[int]] = {kind: [] for kind in self._kind_of.values()}
        for place, token_id in enumerate(ids):
            if token_id in self._kinds:
                places[self._kinds[token_id]].append(place)
        used = Counter[str]()
        spans = []
        for item in media:
            start = used[item.kind]
            used[item.kind] += item.num_tokens
            spans.append(_span(item, places[item.kind][start : used[item.kind]]))
        for kind, found in places.items():
            if len(found) != used[kind]:
                raise MediaError(
                    f"the prompt has {len(found)} placeholder tokens for {kind}s that take "
                    f"{used[kind]}; its text may hold more of them than the {kind}s given"
                )
        return Expanded(ids=list(ids), spans=tuple(sorted(spans, key=lambda span: span.offset)))

    def expand(
        self, ids: Sequence[int], media: Sequence[MediaInput], encode: Callable[[str], list[int]]
    ) -> Expanded:
        """The i-th placeholder of a kind takes the i-th item of it, as many ids as it has tokens.

        Runs that hold whole items already, id by id, stay as they are, and so do ids that hold all
        of all items, whatever stands between. encode: text to ids, for items with a prompt_text.
        Raises MediaError when places and items do not match, either way.
        """
        if not media:
            return Expanded(ids=list(ids), spans=())
        given = Counter(item.kind for item in media)
        queues = {kind: [item for item in media if item.kind == kind] for kind in given}
        places = [place for place, token_id in enumerate(ids) if token_id in self._kinds]
        found = Counter(self._kinds[ids[place]] for place in places)
        totals = {kind: sum(item.num_tokens for item in queues[kind]) for kind in queues}
        if found == totals and found != given:
            return self.locate(ids, media)
        expanded: list[int] = []
        spans: list[MediaSpan] = []
        end = 0
        for start in places:
            if start < end:  # within the run that was just written
                continue
            kind, copied, end = self._kinds[ids[start]], end, _run_end(ids, start)
            expanded += ids[copied:start]
            is_single = found[kind] == given[kind]
            taken = _take(queues.get(kind, []), end - start, is_single)
            if taken is None:
                raise MediaError(_unmatched(kind, end - start, found[kind], given[kind]))
            is_whole = not is_single and end - start == sum(item.num_tokens for item in taken)
            for item in taken:
                own = [ids[start]] * item.num_tokens
                if item.prompt_text is not None and not is_whole:
                    own = encode(item.prompt_text)
                spans.append(_written(item, own, ids[start], len(expanded)))
                expanded += own
        expanded += ids[end:]
        for kind, left in queues.items():
            if left:
                raise MediaError(_mismatch(kind, given[kind] - len(left), given[kind]))
        return Expanded(ids=expanded, spans=tuple(spans))

    def _add(self, kind: str, processor: MediaProcessor, tokenizer: PromptTokenizer) -> None:
        token_id = tokenizer.token_id(processor.token)
        if token_id is None:
            raise CheckpointError(
                f"the tokenizer has no token {processor.token!r}, which stands for {kind} in this "
                "model's prompts; give the model's own tokenizer"
            )
        self._kinds[token_id] = kind
        self._kind_of[processor.token] = kind
        for marker in (processor.token, *processor.markers):
            self._tokens[marker] = processor.token
            alias = tokenizer.token_ids(marker)
            if alias and alias != (token_id,):
                self._aliases[alias] = token_id


def _span(item: MediaInput, places: Sequence[int]) -> MediaSpan:
    """The item at its placeholder tokens, which are as many as it says."""
    if len(places) != item.num_tokens:
        raise MediaError(
            f"the text that stands for the {item.kind} has {len(places)} placeholder tokens, but "
            f"the {item.kind} has {item.num_tokens} embeddings"
        )
    offset = places[0]
    is_whole = places[-1] - offset + 1 == len(places)
    rows = None if is_whole else tuple(place - offset for place in places)
    return MediaSpan(offset=offset, item=item, rows=rows)


def _written(item: MediaInput, ids: Sequence[int], token_id: int, offset: int) -> MediaSpan:
    """The item, written out as `ids` from `offset` on."""
    return _span(item, [offset + place for place, own in enumerate(ids) if own == token_id])


def _run_end(ids: Sequence[int], start: int) -> int:
    """Where the run of equal ids that begins at `start` ends."""
    end, token_id = start + 1, ids[start]
    while end < len(ids) and ids[end] == token_id:
        end += 1
    return end


def _take(queue: list[MediaInput], length: int, is_single: bool) -> list[MediaInput] | None:
    """Takes the items that a run of `length` placeholder ids stands for; None if it fits none."""
    sums = [0, *accumulate(item.num_tokens for item in queue)]
    if not is_single and length in sums:
        length = sums.index(length)
    elif length > len(queue):
        return None
    taken = queue[:length]
    del queue[:length]
    return taken


def _unmatched(kind: str, length: int, found: int, given: int) -> str:
    return (
        f"{_mismatch(kind, found, given)} (a run of {length} placeholders is neither one for each "
        "item nor as many as whole items have tokens)"
    )


def _mismatch(kind: str, found: int, given: int) -> str:
    what = "more" if found > given else "fewer"
    return (
        f"the prompt has {found} {kind} placeholder{'s' * (found != 1)}, {what} than the {given} "
        f"{kind} item{'s' * (given != 1)} given; give one placeholder for each item"
    )
