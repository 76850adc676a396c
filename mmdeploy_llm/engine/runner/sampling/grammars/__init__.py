"""Grammars of guided decoding: what a request gives, translated for llguidance, and its check in a
process that can be killed. Imports no torch.

    GuidedDecodingParams --sources.py--> grammar of llguidance --probe.py--> good, or RequestError
      (EBNF: ebnf.py, tags: tags.py)                           in a child with limits
"""

from .probe import Probe
from .sources import Constraint, ignored_formats, read_constraint, translate, wrong
from .vocabulary import Vocabulary

__all__ = [
    "Constraint",
    "Probe",
    "Vocabulary",
    "ignored_formats",
    "read_constraint",
    "translate",
    "wrong",
]
