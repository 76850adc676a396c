"""From logits to the next token of every request, vectorised over the batch."""

from .grammar import GrammarBackend
from .logprobs import token_logprobs
from .sampler import Sampler, SampleResult
from .slot import SlotRequest

__all__ = ["GrammarBackend", "SampleResult", "Sampler", "SlotRequest", "token_logprobs"]
