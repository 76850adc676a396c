"""How PaddleOCR-VL writes boxes: a line of text, then four corners as eight tokens, from 0 to
1000."""

from mmdeploy_llm.hooks import BoxRule

RULE = BoxRule(
    pattern=r"(?:<\|LOC_\d{1,4}\|>){8}",
    corners=4,
    is_special=True,
)
