"""Layers whose cache is a state of fixed size: gated delta rule, Mamba-2, short convolutions.
Plugins import them from mmdeploy_llm.layers.

    short_conv    a causal convolution over few tokens, alone and in LFM2's gated form
    delta_rule    the gated delta rule in chunks and token by token
    gated_delta   the layer of Qwen3-Next and Qwen3.5
    mamba2        the layer of Granite 4
"""
