"""Norms of every family are rounded as those of transformers' model are, in bf16 too."""

import pytest
import torch
import transformers

from mmdeploy_llm.layers.basic.norm import RMSNorm
from mmdeploy_llm.testing.models.base import factory_of
from mmdeploy_llm.testing.tiny import families, family_of, tokenizer_of

LAYER_NORMS = {  # families without an RMSNorm, or with transformers' own alone
    *("bert", "blip", "bloom", "camembert", "canary", "clip", "cohere", "cohere2", "cohere_asr"),
    *("colmodernvbert", "distilbert", "electra", "embedding_gemma2_text", "falcon", "florence2"),
    *("git", "gpt_neo", "gpt_neox", "gte", "jais2", "jina_embeddings_v3", "modernbert"),
    *("moonshine", "moonshine_streaming", "mpnet", "mpt", "nemotron", "neomme_retrieval"),
    *("nomic_bert", "olmo", "phi"),
    *("pp_formulanet", "roberta", "siglip", "siglip2", "stablelm", "starcoder2", "tipsv2"),
    *("vision_encoder_decoder", "whisper", "xlm_roberta"),
}
FAMILIES = {name: spec for name, spec in families().items() if name not in LAYER_NORMS}
QUICK = ("gemma4", "llama", "olmo2")


def both_norms(spec):
    """Yields the norms of transformers' model of a family, each with ours of the same weight."""
    described = family_of(spec)
    config = described.make_config(tokenizer_of(described), {})
    config.architectures = [described.architecture]
    with torch.device("meta"):
        reference = getattr(transformers, described.architecture)(config)
        modules = dict(factory_of(spec)(config).named_modules())
    for name, module in reference.named_modules():
        targets = modules[""].weight_targets(f"{name}.weight") or ()
        own = modules.get(targets[0].name.rpartition(".")[0]) if len(targets) == 1 else None
        if isinstance(own, RMSNorm):
            yield module, own


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.full] * (name not in QUICK)) for name in FAMILIES],
)
def test_norms_have_the_bits_of_transformers(family):
    """No kernels are used, since these add the squares in another order. Gemma 4 takes another
    root."""
    generator = torch.Generator().manual_seed(0)
    checked = set()
    for module, own in both_norms(FAMILIES[family]):
        kinds = type(module), type(own), own.eps
        if kinds in checked:
            continue
        checked.add(kinds)
        (size,) = module.weight.shape
        x, weight = (torch.randn(n, size, generator=generator).bfloat16() for n in (50, 1))
        for norm in (module, own):
            norm.to_empty(device="cpu").bfloat16().weight.data.copy_(weight[0])
        expected, found = module(x), own(x)
        differ = int((expected != found).sum())
        assert differ <= (expected.numel() // 1000 if family.startswith("gemma4") else 0), kinds
    assert checked, "no RMSNorm is one of theirs; a family without any belongs to LAYER_NORMS"
