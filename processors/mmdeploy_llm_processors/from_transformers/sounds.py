"""TransformersSounds: processors of sounds on feature extractors of transformers."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch

from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_processors.sized import Prepared, SoundProcessor

from .lending import Lender
from .loading import cut_by, described, load_feature_extractor, longest, prepared_by


class TransformersSounds(SoundProcessor):
    """Prepares sounds by a feature extractor of transformers. A family sets `token` and `markers`,
    names the tensors, and says by `written` or `num_tokens` what text a sound has. Safe for use
    from several threads.

    source: the name of transformers' class; None: what the checkpoint names.
    tensors: those of its results that the family's `encode_media` reads.
    arguments: of its call, such as {"return_attention_mask": True}.
    """

    source: ClassVar[str | None] = None
    tensors: ClassVar[tuple[str, ...]] = ("input_features",)
    arguments: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        extractor = load_feature_extractor(checkpoint, self.source)
        self._lender = Lender(lambda: copy.deepcopy(extractor))
        self._identity = f"{described(extractor)}\0{sorted(self.arguments.items())!r}"
        self.rate, self.because = int(extractor.sampling_rate), cut_by(extractor)
        self.most = self.longest(longest(extractor))

    @abstractmethod
    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns the number of embeddings that the family's encoder makes of these results, which
        may depend on the length of the sound only."""

    def written(self, made: Mapping[str, torch.Tensor]) -> str:
        """Returns the text of a sound with these results; by default its tokens alone."""
        return self.token * self.num_tokens(made)

    @property
    def identity(self) -> str:
        """Returns the class of transformers, its fields and the arguments of its call."""
        return self._identity

    def prepare(self, content: np.ndarray, settings: Mapping[str, Any]) -> Prepared:
        """Returns what transformers makes of the samples. Raises MediaError for sounds that it
        cannot take, such as shorter ones than a window."""
        samples = len(content), self.rate
        with self._lender.lent() as extractor, prepared_by(extractor, *samples):
            made = extractor(
                content, sampling_rate=self.rate, return_tensors="pt", **self.arguments
            )
        return Prepared(
            tensors={name: made[name] for name in self.tensors},
            text=self.written(made),
            seconds=len(content) / self.rate,
        )
