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
            tiny=f"{TINY}:BERT",
        ),
        ModelSpec(
            name="electra",
            architectures=_architectures("Electra", "ForPreTraining"),
            factory=f"{MODULE}:ElectraModel",
            tiny=f"{TINY}:ELECTRA",
        ),
        ModelSpec(
            name="distilbert",
            architectures=_architectures("DistilBert"),
            factory=f"{MODULE}:DistilBertModel",
            tiny=f"{TINY}:DISTILBERT",
        ),
        ModelSpec(
            name="roberta",
            architectures=_architectures("Roberta"),
            factory=f"{MODULE}:RobertaModel",
            tiny=f"{TINY}:ROBERTA",
        ),
        ModelSpec(
            name="xlm_roberta",
            architectures=_architectures("XLMRoberta"),
            factory=f"{MODULE}:RobertaModel",
            tiny=f"{TINY}:XLM_ROBERTA",
        ),
        ModelSpec(
            name="camembert",
            architectures=_architectures("Camembert"),
            factory=f"{MODULE}:RobertaModel",
            tiny=f"{TINY}:CAMEMBERT",
        ),
        ModelSpec(
            name="jina_embeddings_v3",
            architectures=_architectures("JinaEmbeddingsV3"),
            factory=f"{MODULE}:JinaModel",
            tiny=f"{TINY}:JINA",
        ),
        ModelSpec(
            name="nomic_bert",
            architectures=_architectures("NomicBert"),
            factory=f"{MODULE}:NomicBertModel",
            tiny=f"{TINY}:NOMIC",
        ),
        ModelSpec(
            name="gte",
            architectures=_architectures("Gte"),
            factory=f"{MODULE}:GteModel",
            tiny=f"{TINY}:GTE",
        ),
        ModelSpec(
            name="mpnet",
            architectures=_architectures("MPNet"),
            factory="mmdeploy_llm_plugins.bert.mpnet:MPNetModel",
            tiny=f"{TINY}:MPNET",
        ),
        ModelSpec(
            name="modernbert",
            architectures=_architectures("ModernBert"),
            factory="mmdeploy_llm_plugins.bert.modern:ModernBertModel",
            tiny=f"{TINY}:MODERNBERT",
        ),
    )
