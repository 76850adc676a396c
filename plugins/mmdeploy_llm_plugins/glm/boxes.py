"""How GLM-4V writes boxes: <|begin_of_box|>[[100, 200, 300, 400]]<|end_of_box|> or JSON, from 0 to
1000. Its markers stand around other answers too."""

from mmdeploy_llm.hooks import BoxRule

RULE = BoxRule(
    keys=("bbox_2d", "bbox"),
    pattern=r"\[\[?\s?\d[-\d\s.,\[\]]*",
)
