"""Placeholders: where media stand in a prompt, and how many tokens each of them takes there.

text  "Picture 1:<|image@placeholder|>"   markers of any processor
  --> "Picture 1:<|IMAGE_PLACEHOLDER|>"   one placeholder token each     (in_text)
  --> [.., 100295]                        tokenized as a whole           (the tokenizer)
  --> [.., 100295, 100295, 100295, ..]    num_tokens of them             (expand)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
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
        self._aliases: dict[int, int] = {}  # id of another marker -> placeholder id
        self._tokens: dict[str, str] = {}  # marker -> placeholder token
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
        """`ids` with every marker that is a token of its own as its placeholder's id."""
        return [self._aliases.get(token_id, token_id) for token_id in ids]

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

    def expand(self, ids: Sequence[int], media: Sequence[MediaInput]) -> Expanded:
        """The i-th placeholder of a kind takes the i-th item of it, as many ids as it has tokens.

        Runs that hold whole items already, id by id, stay as they are. Raises MediaError when
        places and items do not match, either way.
        """
        if not media:
            return Expanded(ids=list(ids), spans=())
        given = Counter(item.kind for item in media)
        queues = {kind: [item for item in media if item.kind == kind] for kind in given}
        places = [place for place, token_id in enumerate(ids) if token_id in self._kinds]
        found = Counter(self._kinds[ids[place]] for place in places)
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
            for item in taken:
                spans.append(MediaSpan(offset=len(expanded), item=item))
                expanded += [ids[start]] * item.num_tokens
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
        for marker in (processor.token, *processor.markers):
            self._tokens[marker] = processor.token
            alias = tokenizer.token_id(marker)
            if alias is not None and alias != token_id:
                self._aliases[alias] = token_id


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
