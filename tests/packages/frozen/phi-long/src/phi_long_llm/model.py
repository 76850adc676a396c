"""A decoder whose rotary frequencies depend on the length of a sequence."""

from dataclasses import replace

import torch
from mmdeploy_llm.layers import CausalLM, RotaryConfig, standard_decoder
from mmdeploy_llm.weights.map import WeightMap
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class PhiLongForCausalLM(CausalLM):
    def __init__(self, config):
        decoder = replace(standard_decoder(config, own=()), rotary=rotary_config(config))
        super().__init__(decoder)
        ignored = (r"^lm_head\.",) if decoder.is_tied else ()
        self.weight_map = WeightMap(self, ignored=ignored)


def rotary_config(config):
    rope = config.rope_parameters
    head_dim = config.hidden_size // config.num_attention_heads
    turned_dim = int(head_dim * rope["partial_rotary_factor"])
    if rope["rope_type"] != "longrope":
        return RotaryConfig(head_dim=head_dim, theta=rope["rope_theta"], turned_dim=turned_dim)
    after = rope["original_max_position_embeddings"]
    with torch.device("cpu"):
        make = ROPE_INIT_FUNCTIONS["longrope"]
        short, scale = make(config, device="cpu", seq_len=None)
        long, _ = make(config, device="cpu", seq_len=after + 1)
    return RotaryConfig(
        head_dim=head_dim,
        turned_dim=turned_dim,
        frequencies=tuple(short.tolist()),
        long_frequencies=tuple(long.tolist()),
        long_after=after,
        scale=float(scale),
    )
