"""How Gemma writes boxes: JSON with "box_2d", [top, left, bottom, right] from 0 to 1000."""

from mmdeploy_llm.hooks import BoxRule

RULE = BoxRule(keys=("box_2d",), order="yxyx")
