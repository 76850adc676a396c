"""Chooses the next token of every request from its logits, vectorised over the batch."""

from .grammar import GrammarBackend
from .logprobs import prompt_logprobs
from .make import make_sampler
from .processors import LogitsProcessors
from .results import PendingSample, SampleResult
from .sampler import Sampler
from .state import SlotRequest

__all__ = [
    "GrammarBackend",
    "LogitsProcessors",
    "PendingSample",
    "SampleResult",
    "Sampler",
    "SlotRequest",
    "make_sampler",
    "prompt_logprobs",
]
