"""BERT and the encoders that grew from it, for vectors of texts and for scores of pairs."""

from __future__ import annotations

from mmdeploy_llm.hooks import ModelSpec, hookimpl

PACKAGE = "mmdeploy_llm_plugins.bert"


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the specs of the families, named as in transformers."""
    return (*_with_tables(), *_with_rotation())


def _classes(name: str, *others: str) -> tuple[str, ...]:
    """Returns the classes of a family that its encoder serves."""
    kinds = ("Model", "ForMaskedLM", "ForSequenceClassification", *others)
    return tuple(name + kind for kind in kinds)


def _with_tables() -> tuple[ModelSpec, ...]:
    """Returns the specs of those with learned positions."""
    return (
        ModelSpec(
            name="bert",
            architectures=_classes("Bert", "ForPreTraining"),
            factory=f"{PACKAGE}.families:BertModel",
            tiny=f"{PACKAGE}.tiny:BERT",
        ),
        ModelSpec(
            name="camembert",
            architectures=_classes("Camembert"),
            factory=f"{PACKAGE}.families:RobertaModel",
            tiny=f"{PACKAGE}.tiny:CAMEMBERT",
        ),
        ModelSpec(
            name="distilbert",
            architectures=_classes("DistilBert"),
            factory=f"{PACKAGE}.families:DistilBertModel",
            tiny=f"{PACKAGE}.tiny:DISTILBERT",
        ),
        ModelSpec(
            name="electra",
            architectures=_classes("Electra", "ForPreTraining"),
            factory=f"{PACKAGE}.families:ElectraModel",
            tiny=f"{PACKAGE}.tiny:ELECTRA",
        ),
        ModelSpec(
            name="mpnet",
            architectures=_classes("MPNet"),
            factory=f"{PACKAGE}.mpnet:MPNetModel",
            tiny=f"{PACKAGE}.tiny:MPNET",
        ),
        ModelSpec(
            name="roberta",
            architectures=_classes("Roberta"),
            factory=f"{PACKAGE}.families:RobertaModel",
            tiny=f"{PACKAGE}.tiny:ROBERTA",
        ),
        ModelSpec(
            name="xlm_roberta",
            architectures=_classes("XLMRoberta"),
            factory=f"{PACKAGE}.families:RobertaModel",
            tiny=f"{PACKAGE}.tiny:XLM_ROBERTA",
        ),
    )


def _with_rotation() -> tuple[ModelSpec, ...]:
    """Returns the specs of those with a rotary embedding."""
    return (
        ModelSpec(
            name="eurobert",
            architectures=("EuroBertModel", "EuroBertForMaskedLM"),
            factory=f"{PACKAGE}.euro:EuroBertModel",
            tiny=f"{PACKAGE}.tiny:EUROBERT",
        ),
        ModelSpec(
            name="gte",
            architectures=_classes("Gte"),
            factory=f"{PACKAGE}.families:GteModel",
            tiny=f"{PACKAGE}.tiny:GTE",
        ),
        ModelSpec(
            name="jina_embeddings_v3",
            architectures=_classes("JinaEmbeddingsV3"),
            factory=f"{PACKAGE}.families:JinaModel",
            tiny=f"{PACKAGE}.tiny:JINA",
        ),
        ModelSpec(
            name="modernbert",
            architectures=_classes("ModernBert"),
            factory=f"{PACKAGE}.modern:ModernBertModel",
            tiny=f"{PACKAGE}.tiny:MODERNBERT",
        ),
        ModelSpec(
            name="nomic_bert",
            architectures=_classes("NomicBert"),
            factory=f"{PACKAGE}.families:NomicBertModel",
            tiny=f"{PACKAGE}.tiny:NOMIC",
        ),
        ModelSpec(
            name="ultrabert",
            architectures=("UltrabertModel", "UltrabertForMaskedLM"),
            factory=f"{PACKAGE}.euro:EuroBertModel",
            tiny=f"{PACKAGE}.tiny:ULTRABERT",
        ),
    )
