"""PP-FormulaNet, whose answers have a space between any two tokens of LaTeX."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm.hooks import ReadingPreset, ReadPage

FORMULANET = ReadingPreset(
    name="pp-formulanet",
    aliases=("formulanet",),
    architectures=("PPFormulaNetForConditionalGeneration",),
    tasks={"page": "", "formula": ""},
    max_tokens=1024,
    convert="mmdeploy_llm_plugins.documents.formulanet:cleaned",
    source="No prompt: the family reads pictures of single formulas. Spaces are removed as by "
    "transformers' PPFormulaNetProcessor. 1,024 tokens: a choice of this preset.",
)


def cleaned(answer: str, page: ReadPage) -> str:
    """Returns an answer without the spaces that LaTeX does not need, in a block of its own."""
    found: str = _processor().post_process_generation(answer)
    return f"$$\n{found.strip()}\n$$" if found.strip() else ""


def _processor() -> Any:
    """Returns transformers' processor without its parts, of which its rules for texts need none."""
    from transformers import PPFormulaNetProcessor  # seconds, for those who read formulas

    accept = {"check_argument_for_proper_class": lambda *_: None}
    rules: Any = type("Rules", (PPFormulaNetProcessor,), accept)
    return rules(None, None)
