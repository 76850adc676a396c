"""Reads GGUF files of Acme, whose converter adds 1 to norms and halves the heads' order, as that of
others does, and has a name of its own for the down projection."""

from mmdeploy_llm.weights.gguf.tables import ADDED_ONE, PERMUTED, GGUFTable, TextModel


def _config(metadata):
    return {"rms_norm_eps": metadata.number("epsilon"), "attention_bias": False}


TABLE = GGUFTable(
    models={
        "acme": TextModel(
            model_type="seed_oss",
            model="SeedOssForCausalLM",
            config=_config,
            changes={**ADDED_ONE, **PERMUTED},
            names={"blk.{bid}.acme_down": "model.layers.{bid}.mlp.down_proj"},
            has_rms_norm=False,
        )
    }
)
