"""How Florence-2 writes boxes: a label, then four tokens from <loc_0> to <loc_999> for each of its
boxes, all in one line; text in a picture has eight, the corners of a quadrangle, and a mask has
those of a polygon. A token names a bin, of which transformers takes the middle."""

from mmdeploy_llm.hooks import BoxRule

RULE = BoxRule(pattern=r"(?:<loc_\d{1,3}>)+", has_both=True, is_special=True, offset=0.5)
