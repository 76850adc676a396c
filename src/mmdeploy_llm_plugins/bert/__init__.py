"""BERT and the encoders that grew from it, for vectors of texts and for scores of pairs."""

from __future__ import annotations

from mmdeploy_llm.hooks import ModelSpec, hookimpl

PACKAGE = "mmdeploy_llm_plugins.bert"
FAMILIES = {  # name -> name of the classes in transformers, factory, tiny checkpoint
    "bert": ("Bert", "families:BertModel", "BERT"),
    "camembert": ("Camembert", "families:RobertaModel", "CAMEMBERT"),
    "distilbert": ("DistilBert", "families:DistilBertModel", "DISTILBERT"),
    "electra": ("Electra", "families:ElectraModel", "ELECTRA"),
    "gte": ("Gte", "families:GteModel", "GTE"),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", "families:JinaModel", "JINA"),
    "modernbert": ("ModernBert", "modern:ModernBertModel", "MODERNBERT"),
    "mpnet": ("MPNet", "mpnet:MPNetModel", "MPNET"),
    "nomic_bert": ("NomicBert", "families:NomicBertModel", "NOMIC"),
    "roberta": ("Roberta", "families:RobertaModel", "ROBERTA"),
    "xlm_roberta": ("XLMRoberta", "families:RobertaModel", "XLM_ROBERTA"),
}
KINDS = ("Model", "ForMaskedLM", "ForSequenceClassification")  # of classes that are served
PRETRAINED = ("bert", "electra")  # they have another class, with the heads of the pre-training


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the specs of the families, named as in transformers."""
    return tuple(_spec(name, *rest) for name, rest in FAMILIES.items())


def _spec(name: str, prefix: str, factory: str, tiny: str) -> ModelSpec:
    kinds = (*KINDS, "ForPreTraining") if name in PRETRAINED else KINDS
    return ModelSpec(
        name=name,
        architectures=tuple(prefix + kind for kind in kinds),
        factory=f"{PACKAGE}.{factory}",
        tiny=f"{PACKAGE}.tiny:{tiny}",
    )
