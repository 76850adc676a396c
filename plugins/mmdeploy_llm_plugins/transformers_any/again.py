"""Again: computes all of a sequence again at each step, for models that keep nothing of earlier
tokens, or what is not known here. The engine's pages hold the tokens themselves.

    one pass   forward(prompt and answer so far)
    repeated   generate(prompt), which is made to write the answer so far

The second is what transformers' own answer is, whatever a model does around its layers. A trial
shows whether the first gives the same. Both are slow: the time of an answer grows with the square
of its length, or its cube.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from mmdeploy_llm.caches import PagedKV
from mmdeploy_llm.errors import MMDeployLLMError, ModelNotSupportedError, RequestError
from mmdeploy_llm.forward import ForwardInputs, SequenceAttention

from . import limits, mechanisms, trial
from .interface import NotCausal
from .probe import Sizes
from .wrapped import Parts

logger = logging.getLogger(__name__)

NUM_BITS = 31  # of a token's id
WIDTH = NUM_BITS + 1  # and whether it is of the prompt
NUM_TOKENS = 9  # of the trial
BEGUN = (1, 4)  # of which these are the prompt
ROUNDING, ROUNDING_OF_HALF = 1e-3, 0.05


class Again:
    """Runs the whole model on all tokens of one sequence after the other, at each step.

    because: why no faster way can; raised if this one fails too. hidden_size: channels of what the
    head reads, which is what `forward` returns.
    """

    def __init__(self, parts: Parts, because: ModelNotSupportedError) -> None:
        head = parts.inner.get_output_embeddings()
        has_head = isinstance(getattr(head, "weight", None), Tensor)
        if not has_head or isinstance(because, NotCausal) or _has_media(parts.inner):
            raise because
        self._parts, self._because, self._head = parts, because, head
        self._limit = limits.of_chunks(parts.decoder.config)
        self.hidden_size = int(head.weight.shape[-1])
        # Why one pass is not enough; None: it is. Until the trial it is taken for enough.
        self._why_repeated: str | None = None
        parts.decoder.config._attn_implementation = "eager"
        parts.inner.generation_config = transformers.GenerationConfig(pad_token_id=0)

    def check_on_weights(self) -> Sizes:
        """Runs a trial, which shows whether one pass is enough. Returns the sizes of the cache."""
        try:
            with torch.inference_mode():
                self._try()
        except MMDeployLLMError:
            raise
        except Exception as error:  # transformers' code: anything may come
            raise self._because from error
        how = "" if self._why_repeated is None else f", by `generate` since {self._why_repeated}"
        logger.warning(
            "%s computes all tokens of a sequence again for each new one%s, which is slow; the "
            "reason: %s",
            self._parts.name,
            how,
            self._because,
        )
        return Sizes(layers=(PagedKV(num_kv_heads=1, head_dim=WIDTH),))

    @property
    def repeats(self) -> bool:
        """Whether `generate` runs again, instead of one pass."""
        return self._why_repeated is not None

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """Names what this way does for the model."""
        own = mechanisms.REPEATED if self.repeats else mechanisms.RECOMPUTED
        return (mechanisms.ONE_AFTER_THE_OTHER, own)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns what the head reads, [T, hidden_size]: NaN for tokens of a prompt before its
        last, where a prompt is computed as a whole."""
        self._limit.check(self._parts.name, inputs.positions)
        attn: Any = inputs.attn
        numbers = range(len(attn.sequences))
        return torch.cat([self._rows(attn, number, inputs) for number in numbers])

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits: [N, hidden_size] -> [N, vocab]. Raises RequestError for rows that
        `forward` does not know."""
        if self.repeats and bool(hidden[:, 0].isnan().any()):
            raise RequestError(
                f"{self._parts.name} computes a prompt as a whole, so its tokens have no "
                "probabilities; leave out prompt_logprobs"
            )
        found: Tensor = self._head(hidden)
        return found

    def _rows(self, attn: SequenceAttention, number: int, inputs: ForwardInputs) -> Tensor:
        """Returns the rows of one sequence in this step."""
        rows = attn.sequences[number]
        own, count = slice(rows.start, rows.end), rows.end - rows.start
        new = _bits(inputs.token_ids[own], inputs.in_prompt[own]).to(self._head.weight.dtype)
        kept, _ = attn.extend(number, 0, new.unsqueeze(1), torch.zeros_like(new).unsqueeze(1))
        ids, num_prompt = _tokens(kept[:, 0])
        if not self.repeats:
            return self._in_one_pass(ids)[-count:]
        found, _ = self._repeated(ids, num_prompt)
        missing = max(0, count - len(found))
        return F.pad(found, (0, 0, missing, 0), value=torch.nan)[-count:]

    def _in_one_pass(self, ids: Tensor) -> Tensor:
        """Returns what the head reads of each token."""
        with self._read() as found:
            self._parts.inner(input_ids=ids.unsqueeze(0), use_cache=False)
        (rows,) = found
        return rows

    def _repeated(self, ids: Tensor, num_prompt: int) -> tuple[Tensor, Tensor]:
        """Returns what the head reads, and the logits, after the prompt and after each token of the
        answer."""
        prompt, answer = ids[:num_prompt].unsqueeze(0), ids[num_prompt:]
        with self._read() as found:
            out = self._parts.inner.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=len(answer) + 1,
                logits_processor=[_Written(num_prompt, answer)],
                output_logits=True,
                return_dict_in_generate=True,
            )
        return torch.stack([rows[-1] for rows in found]), torch.cat(out.logits)

    @contextmanager
    def _read(self) -> Iterator[list[Tensor]]:
        """Yields the list in which each call of the head puts what it reads [n, hidden_size], of
        several streams the first (ProphetNet's)."""
        found: list[Tensor] = []

        def note(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            found.append(given[0].reshape(-1, *given[0].shape[-2:])[0])

        hook = self._head.register_forward_pre_hook(note)
        try:
            yield found
        finally:
            hook.remove()

    def _try(self) -> None:
        """Finds out whether one pass gives the same as `generate`. Raises ModelNotSupportedError
        where the head alone does not give the logits."""
        parts = self._parts
        ids = trial.text_ids(parts.inner.config, self._head.weight, NUM_TOKENS)
        answers = []
        for count in BEGUN:
            hidden, logits = self._repeated(ids, count)
            if not _is_same(self.logits(hidden), logits):
                raise self._because
            answers.append(hidden)
        self._why_repeated = self._why_not_one_pass(ids, answers)

    def _why_not_one_pass(self, ids: Tensor, answers: Sequence[Tensor]) -> str | None:
        """Returns why one pass does not give what `generate` does; None where it does. answers: of
        BEGUN."""
        try:
            rows = self._in_one_pass(ids)
        except Exception as error:  # transformers' code: anything may come
            return f"one pass failed ({type(error).__name__}: {error!s:.200})"
        if len(rows) != len(ids):
            return f"one pass over {len(ids)} tokens gives {len(rows)} rows"
        pairs = zip(BEGUN, answers, strict=True)
        if all(_is_same(rows[count - 1 :], hidden) for count, hidden in pairs):
            return None
        return "one pass gives something else"


class _Written(transformers.LogitsProcessor):  # type: ignore[misc]
    """Makes `generate` write an answer, and then any token."""

    def __init__(self, num_prompt: int, answer: Tensor) -> None:
        self._num_prompt, self._answer = num_prompt, answer.tolist()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = input_ids.shape[1] - self._num_prompt
        if place >= len(self._answer):
            return scores
        only = torch.full_like(scores, -torch.inf)
        only[:, self._answer[place]] = 0
        return only


def _has_media(model: Any) -> bool:
    return any(hasattr(model, f"get_{kind}_features") for kind in ("image", "video", "audio"))


def _is_same(found: Tensor, wanted: Tensor) -> bool:
    allowed = ROUNDING if wanted.dtype == torch.float32 else ROUNDING_OF_HALF
    return bool((found - wanted).float().norm() <= allowed * wanted.float().norm())


def _bits(ids: Tensor, in_prompt: Tensor) -> Tensor:
    """[n], [n] -> [n, WIDTH] of zeros and ones, which pages keep exactly in any dtype."""
    places = torch.arange(NUM_BITS, device=ids.device)
    return torch.cat([ids.unsqueeze(-1) >> places & 1, in_prompt.unsqueeze(-1).long()], -1)


def _tokens(rows: Tensor) -> tuple[Tensor, int]:
    """[n, WIDTH] -> ids [n], and how many tokens are of the prompt; the inverse of _bits."""
    bits = rows.round().long()
    places = torch.arange(NUM_BITS, device=rows.device)
    return (bits[:, :NUM_BITS] << places).sum(-1), int(bits[:, NUM_BITS].sum())
