"""Reads quantised checkpoints: each quantised layer appears as an ordinary tensor of floats.

    stored                                            appears as
    X.weight_packed, X.weight_scale, ...              X.weight     compressed.py
    X.qweight, X.qzeros, X.scales, X.g_idx            X.weight     awq.py, gptq.py
    X.weight (8-bit floats), X.weight_scale_inv       X.weight     fp8.py
    X_blocks, X_scales                                X            mxfp4.py

The layers that a checkpoint quantises are known by the names of their tensors, so that whatever a
file holds in floats stays as it is; config.json's quantization_config says how to read the others.
"""

from .reading import QuantizedFile, readable_files

__all__ = ["QuantizedFile", "readable_files"]
