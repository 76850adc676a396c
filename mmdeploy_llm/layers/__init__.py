"""Building blocks for model authors: linear, norm, rotary embedding, MLP, mixture of experts, the standard decoder."""
