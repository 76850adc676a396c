"""How Florence-2 writes boxes: a label, then four tokens from <loc_0> to <loc_999> for each of its
boxes, all in one line; text in a picture has eight, the corners of a quadrangle, and a mask has
those of a polygon. A token names a bin, of which transformers takes the middle."""

from mmdeploy_llm.hooks import BoxRule

TASKS = (  # <OPEN_VOCABULARY_DETECTION> is answered by boxes or polygons
    ("<OD>", 4),
    ("<DENSE_REGION_CAPTION>", 4),
    ("<REGION_PROPOSAL>", 4),
    ("<CAPTION_TO_PHRASE_GROUNDING>", 4),
    ("<OCR_WITH_REGION>", 8),
    ("<REFERRING_EXPRESSION_SEGMENTATION>", 0),
    ("<REGION_TO_SEGMENTATION>", 0),
)
RULE = BoxRule(
    pattern=r"(?:<loc_\d{1,3}>)+", has_both=True, tasks=TASKS, is_special=True, offset=0.5
)
