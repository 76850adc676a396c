"""BERT and the encoders that grew from it, for vectors of texts and for scores of pairs."""

from __future__ import annotations

from mmdeploy_llm.hooks import ModelSpec, hookimpl

MODULE = "mmdeploy_llm_plugins.bert.families"
TINY = "mmdeploy_llm_plugins.bert.tiny"


def _architectures(name: str, *others: str) -> tuple[str, ...]:
    """Returns the classes of a family that its encoder serves."""
    kinds = ("Model", "ForMaskedLM", "ForSequenceClassification", *others)
    return tuple(name + kind for kind in kinds)


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the specs of the families, named as in transformers."""
    return (
        ModelSpec(
            name="bert",
            architectures=_architectures("Bert", "ForPreTraining"),
            factory=f"{MODULE}:BertModel",
        ),
        ModelSpec(
            name="electra",
            architectures=_architectures("Electra", "ForPreTraining"),
            factory=f"{MODULE}:ElectraModel",
        ),
        ModelSpec(
            name="distilbert",
            architectures=_architectures("DistilBert"),
            factory=f"{MODULE}:DistilBertModel",
        ),
        ModelSpec(
            name="roberta",
            architectures=_architectures("Roberta"),
            factory=f"{MODULE}:RobertaModel",
        ),
        ModelSpec(
            name="xlm_roberta",
            architectures=_architectures("XLMRoberta"),
            factory=f"{MODULE}:RobertaModel",
        ),
        ModelSpec(
            name="camembert",
            architectures=_architectures("Camembert"),
            factory=f"{MODULE}:RobertaModel",
        ),
        ModelSpec(
            name="jina_embeddings_v3",
            architectures=_architectures("JinaEmbeddingsV3"),
            factory=f"{MODULE}:JinaModel",
        ),
        ModelSpec(
            name="nomic_bert",
            architectures=_architectures("NomicBert"),
            factory=f"{MODULE}:NomicBertModel",
        ),
        ModelSpec(
            name="gte",
            architectures=_architectures("Gte"),
            factory=f"{MODULE}:GteModel",
        ),
        ModelSpec(
            name="mpnet",
            architectures=_architectures("MPNet"),
            factory="mmdeploy_llm_plugins.bert.mpnet:MPNetModel",
        ),
        ModelSpec(
            name="modernbert",
            architectures=_architectures("ModernBert"),
            factory="mmdeploy_llm_plugins.bert.modern:ModernBertModel",
        ),
    )
