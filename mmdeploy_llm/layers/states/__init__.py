"""Layers whose cache is a state of fixed size: gated delta rule, Mamba-2, short convolutions.
Plugins import them from mmdeploy_llm.layers.

    short_conv    a causal convolution over few tokens, alone and in a gated form
    delta_rule    the gated delta rule in chunks and token by token
    gated_delta   the layer whose state follows the gated delta rule
    mamba2        the state space layer Mamba-2
"""
