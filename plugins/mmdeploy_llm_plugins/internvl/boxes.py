"""How InternVL writes boxes: <ref>a cat</ref><box>[[100, 200, 300, 400]]</box>, from 0 to 1000. The
tags are special tokens, which answers usually do not have."""

from mmdeploy_llm.hooks import BoxRule

RULE = BoxRule(
    keys=("bbox_2d", "bbox", "box_2d"),
    pattern=r"\[\[?\s?\d[-\d\s.,\[\]]*",
)
