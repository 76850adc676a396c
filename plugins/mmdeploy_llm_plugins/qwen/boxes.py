"""How the Qwen-VL models write boxes. Qwen2-VL: "cat(100,200),(300,400)" between special tokens,
from 0 to 1000. Qwen2.5-VL: JSON in pixels of the resized picture. Qwen3-VL: JSON from 0 to 1000."""

from mmdeploy_llm.hooks import BoxRule

KEYS = ("bbox_2d", "bbox")
QWEN2_VL = BoxRule(
    keys=KEYS,
    pattern=r"\(\d{1,5}\s?,\s?\d{1,5}\)\s?,\s?\(\d{1,5}\s?,\s?\d{1,5}\)",
)
QWEN2_5_VL = BoxRule(keys=KEYS, scale=None)
QWEN3_VL = BoxRule(keys=KEYS)
