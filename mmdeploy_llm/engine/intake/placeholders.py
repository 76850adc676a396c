"""Placeholders: the positions of media in a prompt, and how many tokens each of them takes.

text  "Picture 1:<|image@placeholder|>"   markers of any processor
  --> "Picture 1:<|IMAGE_PLACEHOLDER|>"   one placeholder token each     (in_text)
  --> [.., 100295]                        tokenized as a whole           (the tokenizer)
  --> [.., 100295, 100295, 100295, ..]    num_tokens of them             (expand)

An item whose prompt_text is more than placeholder tokens is written into a text prompt before the
prompt is tokenized (fill, locate), because the tokens at its ends may merge with their neighbours.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from mmdeploy_llm.errors import CheckpointError, MediaError, PluginContractError
from mmdeploy_llm.hooks import ITEM_NUMBER, MediaInput, MediaProcessor, MediaSpan
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.media.loading.outside import Expanded

from .clashes import check_clashes
from .tokenizer import PromptTokenizer


class Placeholders:
    """The markers and placeholder ids of all processors of a model.

    Raises CheckpointError when the tokenizer has no token for a processor's placeholder,
    PluginConflictError when two kinds have one, PluginContractError for a part_text without one.
    """

    def __init__(self, media: ModelMedia, tokenizer: PromptTokenizer) -> None:
        check_clashes(media, tokenizer)
        self._tokenizer = tokenizer
        self._kinds: dict[int, str] = {}  # placeholder id -> kind
        self._aliases: dict[tuple[int, ...], int] = {}  # ids of another marker -> placeholder id
        self._tokens: dict[str, str] = {}  # marker -> placeholder token
        self._kind_of: dict[str, str] = {}  # placeholder token -> kind
        self._written: dict[str, int] = {}  # kind -> id that replaces its placeholder at the end
        self._joints: list[tuple[re.Pattern[str], str]] = []
        self.alone: dict[str, int] = {}  # kind whose item is a whole prompt -> placeholder id
        for kind, processor in media.processors.items():
            self._add(kind, processor, tokenizer)
        texts = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        for kind in media.processors:
            text = media.part_text(kind)
            if self.count_in_text(text) != {kind: 1}:
                raise PluginContractError(
                    f"{media.owner(kind)}: part_text must have one marker of the {kind}s and no "
                    f"other, got {text!r}"
                )

    @property
    def markers(self) -> tuple[str, ...]:
        """Every text that represents a media item."""
        return tuple(self._tokens)

    def in_text(self, text: str) -> str:
        """Returns `text` with every marker replaced by its placeholder token."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: self._tokens[found[0]], text)

    def in_ids(self, ids: Sequence[int]) -> list[int]:
        """Returns `ids` with every marker made of added tokens replaced by its placeholder's id. A
        marker before a run of placeholders, or of the tokens that stand for them in a final prompt,
        begins an item that is written out, and stays."""
        found: list[int] = []
        lengths = sorted({len(alias) for alias in self._aliases}, reverse=True)
        start = 0
        while start < len(ids):
            pieces = (tuple(ids[start : start + length]) for length in lengths)
            alias = next((piece for piece in pieces if piece in self._aliases), None)
            if alias is not None:
                rest, own = start + len(alias), self._aliases[alias]
                end = self._written_end(ids, rest, own)
                if end > rest + 1:  # a single one may be the next item's marker
                    found += [*alias, *[own] * (end - rest)]
                    start = end
                    continue
            found.append(ids[start] if alias is None else self._aliases[alias])
            start += 1 if alias is None else len(alias)
        return found

    def _written_end(self, ids: Sequence[int], start: int, placeholder: int) -> int:
        """Returns the end of a run at `start` of one kind's placeholders, or of what replaces them
        in the end, which no other kind is told by; `start` without any."""
        own = [placeholder, self._written.get(self._kinds[placeholder], placeholder)]
        own = [each for each in own if each == placeholder or each not in self._kinds]
        return _run_end(ids, start) if start < len(ids) and ids[start] in own else start

    def count_in_text(self, text: str) -> Counter[str]:
        """Counts the markers in a text by kind."""
        found = self._pattern.findall(text) if self._pattern is not None else []
        return Counter(self._kind_of[self._tokens[marker]] for marker in found)

    def count_in_ids(self, ids: Sequence[int]) -> Counter[str]:
        """Counts the placeholders in token ids by kind."""
        found = self.in_ids(ids)
        return Counter(self._kinds[token_id] for token_id in found if token_id in self._kinds)

    def check_counts(
        self, ids: Sequence[int], num_items: Mapping[str, int], hint: str = ""
    ) -> None:
        """Checks that media and placeholders can match, before anything is opened; placeholders
        may be more, for items that are written out in full. Raises MediaError, with both counts,
        for media without placeholders and placeholders without media, with `hint` at its end."""
        counts = Counter(self._kinds[token_id] for token_id in ids if token_id in self._kinds)
        for kind in sorted(set(self._kinds.values())):
            found, given = counts[kind], num_items.get(kind, 0)
            if found < given or (found and not given):
                raise MediaError(self._told(kind, found, given, hint))

    def _told(self, kind: str, found: int, given: int, hint: str) -> str:
        """Returns what differs and, where placeholders lack, how one is written in a text."""
        fault = _mismatch(kind, found, given)
        if hint or found > given:
            return fault + hint
        token = next(token for token, own in self._kind_of.items() if own == kind)
        if kind in self._written:  # the token only marks places, such as <pad>
            markers = (text for text, own in self._tokens.items() if own == token != text)
            token = next(markers, token)
        return f"{fault}, written {token}; chat() writes them by itself"

    def fill(self, texts: Sequence[str], media: Sequence[MediaInput]) -> list[str]:
        """Returns `texts` with the i-th marker of a kind replaced by the text of its i-th item.
        Raises MediaError when there are more markers than items or fewer."""
        kinds, media = tuple(self._kind_of.values()), media and _numbered(media)
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
        filled = [self._joined(self._pattern.sub(text_of, text)) for text in texts]
        for kind, queue in queues.items():
            if found[kind] != len(queue):
                raise MediaError(_mismatch(kind, found[kind], len(queue)))
        return filled

    def locate(self, ids: Sequence[int], media: Sequence[MediaInput]) -> Expanded:
        """Finds the spans of `media` in ids that contain all of them written out.

        Raises MediaError when there are more or fewer placeholder ids than they have tokens.
        """
        positions: dict[str, list[int]] = {kind: [] for kind in self._kind_of.values()}
        for position, token_id in enumerate(ids):
            if token_id in self._kinds:
                positions[self._kinds[token_id]].append(position)
        used = Counter[str]()
        spans = []
        for item in media:
            start = used[item.kind]
            used[item.kind] += item.num_tokens
            spans.append(_span(item, positions[item.kind][start : used[item.kind]]))
        for kind, found in positions.items():
            if len(found) != used[kind]:
                raise MediaError(
                    f"the prompt has {len(found)} placeholder tokens for {kind}s, but the {kind}s "
                    f"given need {used[kind]}; give one {kind} for each placeholder in the text"
                )
        return self._finished(ids, sorted(spans, key=lambda span: span.offset))

    def expand(
        self, ids: Sequence[int], media: Sequence[MediaInput], encode: Callable[[str], list[int]]
    ) -> Expanded:
        """Expands the i-th placeholder of a kind to the tokens of the kind's i-th item.

        Runs that already contain whole items, id by id, are not changed, nor are ids that contain
        all tokens of all items, whatever is between them. encode: text to ids, for items with a
        prompt_text. Raises MediaError when placeholders and items do not match.
        """
        given, media = Counter(item.kind for item in media), _numbered(media)
        queues = {kind: deque(item for item in media if item.kind == kind) for kind in given}
        positions = [position for position, token_id in enumerate(ids) if token_id in self._kinds]
        found = Counter(self._kinds[ids[position]] for position in positions)
        totals = {kind: sum(item.num_tokens for item in queues[kind]) for kind in queues}
        if found == totals and found != given:
            return self.locate(ids, media)
        expanded: list[int] = []
        spans: list[MediaSpan] = []
        end = 0
        for start in positions:
            if start < end:  # within the run that was just expanded
                continue
            kind, copied, end = self._kinds[ids[start]], end, _run_end(ids, start)
            expanded += ids[copied:start]
            is_single = found[kind] == given[kind]
            taken = _take(queues.get(kind, deque()), end - start, is_single)
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
        return self._finished(expanded, spans)

    def _finished(self, ids: Sequence[int], spans: Sequence[MediaSpan]) -> Expanded:
        """Replaces placeholders of kinds and of embeddings whose final prompt has another token."""
        final = list(ids)
        for span in spans:
            written = self._written.get(span.item.kind)
            if written is not None:
                for start, end in span.runs:
                    final[start:end] = [written] * (end - start)
            for token, rows in span.item.other_tokens:
                token_id = _token_id(token, span.item.kind, self._tokenizer)
                for row in rows:
                    final[span.offset + (row if span.rows is None else span.rows[row])] = token_id
        return Expanded(ids=final, spans=tuple(spans))

    def _joined(self, text: str) -> str:
        """Returns a text with its items, changed where these meet each other and words."""
        for pattern, joint in self._joints:
            text = pattern.sub(joint.replace("\\", r"\\"), text)
        return text

    def _add(self, kind: str, processor: MediaProcessor, tokenizer: PromptTokenizer) -> None:
        token_id = _token_id(processor.token, kind, tokenizer)
        self._kinds[token_id] = kind
        if processor.is_whole_prompt:
            self.alone[kind] = token_id
        if processor.written_token is not None:
            self._written[kind] = _token_id(processor.written_token, kind, tokenizer)
        self._joints += [(re.compile(pattern), text) for pattern, text in processor.joints]
        self._kind_of[processor.token] = kind
        for marker in (processor.token, *processor.markers):
            self._tokens[marker] = processor.token
            alias = tokenizer.token_ids(marker)
            if alias and alias != (token_id,):
                self._aliases[alias] = token_id


def _numbered(media: Sequence[MediaInput]) -> list[MediaInput]:
    """Returns the items with their numbers in their texts."""
    counts, found = Counter[str](), []
    for item in media:
        text = item.prompt_text
        if text is not None and ITEM_NUMBER in text:
            item = replace(item, prompt_text=text.replace(ITEM_NUMBER, str(counts[item.kind])))
        counts[item.kind] += 1
        found.append(item)
    return found


def _token_id(token: str, kind: str, tokenizer: PromptTokenizer) -> int:
    token_id = tokenizer.token_id(token)
    if token_id is None:
        raise CheckpointError(
            f"the tokenizer has no token {token!r}, the {kind} placeholder in this model's "
            "prompts; give the model's own tokenizer"
        )
    return token_id


def _span(item: MediaInput, positions: Sequence[int]) -> MediaSpan:
    """Builds the item's span. Raises MediaError unless each of its embeddings has a position."""
    if len(positions) != item.num_tokens:
        raise MediaError(
            f"the prompt_text of the {item.kind} has {len(positions)} placeholder tokens, but "
            f"the {item.kind} has {item.num_tokens} embeddings"
        )
    offset = positions[0]
    is_contiguous = positions[-1] - offset + 1 == len(positions)
    rows = None if is_contiguous else tuple(position - offset for position in positions)
    return MediaSpan(offset=offset, item=item, rows=rows)


def _written(item: MediaInput, ids: Sequence[int], token_id: int, offset: int) -> MediaSpan:
    """Builds the span of an item that is written out as `ids` from `offset` on."""
    return _span(item, [offset + index for index, own in enumerate(ids) if own == token_id])


def _run_end(ids: Sequence[int], start: int) -> int:
    """Returns the end of the run of equal ids that starts at `start`."""
    end, token_id = start + 1, ids[start]
    while end < len(ids) and ids[end] == token_id:
        end += 1
    return end


def _take(queue: deque[MediaInput], length: int, is_single: bool) -> list[MediaInput] | None:
    """Removes and returns the items of a run of `length` placeholder ids; None if none fit."""
    count = None if is_single else _num_whole(queue, length)
    if count is None and length > len(queue):
        return None
    return [queue.popleft() for _ in range(length if count is None else count)]


def _num_whole(queue: Iterable[MediaInput], length: int) -> int | None:
    """Returns how many of the first items have `length` tokens together; None if none do. Looks at
    no more of them, so that a prompt takes a time that grows as its media."""
    total = 0
    for count, item in enumerate(queue, 1):
        total += item.num_tokens
        if total >= length:
            return count if total == length else None
    return None


def _unmatched(kind: str, length: int, found: int, given: int) -> str:
    return (
        f"{_mismatch(kind, found, given)} (a run of {length} placeholders has neither one for each "
        "item nor as many as whole items have tokens)"
    )


def _mismatch(kind: str, found: int, given: int) -> str:
    what = "more" if found > given else "fewer"
    return (
        f"the prompt has {found} {kind} placeholder{'s' * (found != 1)}, {what} than the {given} "
        f"{kind} item{'s' * (given != 1)} given; give one placeholder for each item"
    )
