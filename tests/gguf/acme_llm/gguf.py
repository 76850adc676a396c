"""Reads GGUF files of Acme, whose converter adds 1 to norms and halves the heads' order, as that of
others does, and has a name of its own for the down projection."""

from mmdeploy_llm.gguf.tables import ADDED_ONE, PERMUTED, GGUFTable, TextModel

TABLE = GGUFTable(
    models={
        "acme": TextModel(
            model_type="llama",
            model="AcmeForCausalLM",
            config=lambda metadata: {"rms_norm_eps": metadata.number("epsilon")},
            changes={**ADDED_ONE, **PERMUTED},
            names={"blk.{bid}.acme_down": "model.layers.{bid}.mlp.down_proj"},
            has_rms_norm=False,
        )
    }
)
