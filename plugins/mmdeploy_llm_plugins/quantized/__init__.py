"""The formats of quantised checkpoints that come with the engine.

stored                                            appears as
X.weight_packed, X.weight_scale, ...              X.weight     compressed.py
X.qweight, X.qzeros, X.scales, X.g_idx            X.weight     awq.py, gptq.py, autoround.py
X.weight (8-bit floats), X.weight_scale_inv       X.weight     fp8.py
X_blocks, X_scales                                X            mxfp4.py
"""

from __future__ import annotations

from mmdeploy_llm.hooks import WeightFormatSpec, hookimpl

PACKED = (".qweight", ".qzeros", ".scales")
ORDERED = (*PACKED, ".g_idx")
COMPRESSED = (
    *(".weight", ".weight_packed", ".weight_scale", ".weight_shape"),
    *(".weight_zero_point", ".weight_g_idx", ".weight_global_scale"),
)
# Scales of activations and of the KV cache: the engine has its own.
IGNORED = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".output_scale",
    ".activation_scale",
    "_activation_scale",
    "_scale_inv",  # of a weight that transformers left in floats: blocks did not divide it
    ".k_scale",
    ".v_scale",
)


def _spec(name: str, factory: str, suffixes: tuple[str, ...]) -> WeightFormatSpec:
    return WeightFormatSpec(
        name=name, factory=f"{__name__}.{factory}", suffixes=suffixes, ignored=IGNORED
    )


@hookimpl
def provide_weight_formats() -> tuple[WeightFormatSpec, ...]:
    """Returns the formats."""
    return (
        _spec("auto-round", "autoround:autoround_layers", ORDERED),
        _spec("awq", "awq:awq_layers", PACKED),
        _spec("compressed-tensors", "compressed:compressed_layers", COMPRESSED),
        _spec("fp8", "fp8:fp8_layers", (".weight", ".weight_scale_inv")),
        _spec("gptq", "gptq:gptq_layers", ORDERED),
        _spec("mxfp4", "mxfp4:mxfp4_layers", ("_blocks", "_scales")),
    )
