"""How Kosmos-2.5 writes boxes, if asked by <ocr>: four tokens before each line of text, in pixels
of the resized page."""

from mmdeploy_llm.hooks import BoxRule

RULE = BoxRule(
    pattern=r"<bbox>(?P<box>(?:<[xy]_\d{1,5}>){4})</bbox>(?P<label>[^\n<]{0,500})", scale=None
)
