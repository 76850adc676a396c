"""Tiny checkpoints of BERT and the encoders that grew from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from mmdeploy_llm.testing.tiny import VOCAB_SIZE, Family

# Around a text and a pair, as BERT writes them with its token types, and as RoBERTa does.
BERT_FRAMES = ("<s>:0 $A:0 </s>:0", "<s>:0 $A:0 </s>:0 $B:1 </s>:1")
ROBERTA_FRAMES = ("<s>:0 $A:0 </s>:0", "<s>:0 $A:0 </s>:0 </s>:0 $B:0 </s>:0")
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
}
MODERN: Mapping[str, Any] = {"local_attention": 6, "num_hidden_layers": 4}


def encoder_family(
    architecture: str, frames: tuple[str, str] = BERT_FRAMES, **fields: Any
) -> Family:
    """Returns the Family of an encoder. fields: those in which its config differs from SIZES."""

    def make_config(tokenizer: Any, options: Mapping[str, Any]) -> Any:
        ids = {
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "cls_token_id": tokenizer.cls_token_id,
            "sep_token_id": tokenizer.sep_token_id,
        }
        found = {**SIZES, **ids, **fields, **options}
        return getattr(transformers, architecture).config_class(**found)

    return Family(
        architecture=architecture,
        make_config=make_config,
        eos_token="</s>",
        is_embedder=True,
        frames=frames,
    )


BERT = encoder_family("BertModel")
BERT_RERANKER = encoder_family("BertForSequenceClassification", num_labels=1)
CAMEMBERT = encoder_family("CamembertModel", ROBERTA_FRAMES)
DISTILBERT = encoder_family("DistilBertModel", hidden_dim=96)
DISTILBERT_CLASSIFIER = encoder_family(
    "DistilBertForSequenceClassification", hidden_dim=96, num_labels=3
)
ELECTRA = encoder_family("ElectraModel", embedding_size=32)
ELECTRA_RERANKER = encoder_family(
    "ElectraForSequenceClassification", embedding_size=32, num_labels=1
)
GTE = encoder_family("GteModel", ROBERTA_FRAMES)
GTE_RERANKER = encoder_family("GteForSequenceClassification", ROBERTA_FRAMES, num_labels=1)
JINA = encoder_family("JinaEmbeddingsV3Model", ROBERTA_FRAMES)
JINA_CLASSIFIER = encoder_family(
    "JinaEmbeddingsV3ForSequenceClassification", ROBERTA_FRAMES, num_labels=2
)
EUROBERT = encoder_family("EuroBertModel", num_key_value_heads=2, mask_token_id=3)
EUROBERT_OF_MASKS = encoder_family("EuroBertForMaskedLM", num_key_value_heads=2, mask_token_id=3)
ULTRABERT = encoder_family("UltrabertModel", sliding_window=3)
ULTRABERT_OF_MASKS = encoder_family("UltrabertForMaskedLM", sliding_window=3)
MODERNBERT = encoder_family("ModernBertModel", **MODERN)
MODERNBERT_RERANKER = encoder_family(
    "ModernBertForSequenceClassification", num_labels=1, classifier_pooling="mean", **MODERN
)
MPNET = encoder_family("MPNetModel", ROBERTA_FRAMES)
MPNET_CLASSIFIER = encoder_family("MPNetForSequenceClassification", ROBERTA_FRAMES)
NOMIC = encoder_family("NomicBertModel")
NOMIC_RERANKER = encoder_family("NomicBertForSequenceClassification", num_labels=1)
ROBERTA = encoder_family("RobertaModel", ROBERTA_FRAMES)
XLM_ROBERTA = encoder_family("XLMRobertaModel", ROBERTA_FRAMES)
XLM_ROBERTA_RERANKER = encoder_family(
    "XLMRobertaForSequenceClassification", ROBERTA_FRAMES, num_labels=1
)
