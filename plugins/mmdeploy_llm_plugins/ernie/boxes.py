"""How ERNIE 4.5 VL writes boxes: JSON with "bbox_2d", from 0 to 1000."""

from mmdeploy_llm.hooks import BoxRule

RULE = BoxRule(keys=("bbox_2d", "bbox"))
