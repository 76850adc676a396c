"""A model in parts computes what the whole one does. Ranks are threads here."""

from functools import partial

import pytest
import torch

from mmdeploy_llm.errors import ConfigError, PluginContractError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.layers.tp_plan import tp_plan
from mmdeploy_llm.system.sharding import Share, divide, shares_of
from mmdeploy_llm.testing.models.base import CheckFailed, CheckSkipped, factory_of
from mmdeploy_llm.testing.models.dense import DenseRunner
from mmdeploy_llm.testing.models.models import ModelSubject
from mmdeploy_llm.testing.models.prompts import make_prompt
from mmdeploy_llm.testing.models.rank_threads import ThreadRanks, on_ranks, thread_ranks
from mmdeploy_llm.testing.models.ranks import two_ranks_equal_one
from mmdeploy_llm.testing.tiny import write_tiny
from mmdeploy_llm.weights.folder import read_checkpoint

PLUGINS = PluginManager.load(None, ())
# Four heads that share one key/value head, a tied head, experts by modality.
ERNIE = {"hidden_size": 128, "num_attention_heads": 4}
LEFT_WHOLE = ("norm", "ln_q", "patch_embed")
IMAGES = {"text": (), "images": ((1, 4, 6), (1, 8, 4))}


def subject_of(folder, family, spec_options=None, **options):
    write_tiny(family, folder, **options)
    config = read_checkpoint(folder).config
    spec = PLUGINS.model_for(config.architectures)
    if spec_options:
        spec = type(spec)(
            name=spec.name,
            architectures=spec.architectures,
            factory=spec.factory,
            media=spec.media,
            **spec_options,
        )
    return ModelSubject(
        spec=spec,
        folder=folder,
        config=config,
        cases=IMAGES if spec.media else {"text": ()},
        tolerance=1e-4,
        make_prompt=make_prompt,
        make_reference=lambda folder: None,
    )


def whole_on_meta(subject):
    with torch.device("meta"):
        return factory_of(subject.spec)(subject.config)


def split_of(subject, ranks):
    return shares_of(partial(tp_plan, own=subject.spec.tp_plan), ranks, subject.spec.name)


class OneOf:
    """A rank without others, for what needs no exchange."""

    def __init__(self, rank, size):
        self.rank, self.size, self.num_calls = rank, size, 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("ernie4_5_vl_moe", ERNIE),
        ("ernie4_5_moe", {}),
        ("qwen2_5_vl", {"tie_word_embeddings": True}),
        ("qwen2_moe", {}),
        ("qwen3_vl_moe", {}),
        ("paddleocr_vl", {}),
    ],
)
def test_two_ranks_equal_one(tmp_path, family, options):
    two_ranks_equal_one(subject_of(tmp_path, family, **options))


@pytest.mark.full
def test_four_ranks_share_two_key_value_heads(tmp_path):
    subject = subject_of(tmp_path, "qwen2_5_vl")
    ids, media = subject.prompts["images"]
    expected = subject.runner.run(subject.runner.add(ids, media))

    def logits(ranks):
        model = subject.build(torch.float32, split=split_of(subject, ranks))
        assert model.num_kv_heads == 1
        runner = DenseRunner(model)
        return runner.run(runner.add(ids, media))

    for found in on_ranks(thread_ranks(4), logits):
        assert (found - expected).abs().max() < 1e-4


def test_each_rank_holds_its_share(tmp_path):
    subject = subject_of(tmp_path, "qwen2_5_vl", vocab_size=320)
    whole = {name: param.numel() for name, param in whole_on_meta(subject).named_parameters()}
    held, cut = [], set()
    for rank in range(2):
        model = whole_on_meta(subject)
        cut |= set(split_of(subject, OneOf(rank, 2))(model))
        held.append(sum(param.numel() for param in model.parameters()))
    assert all(any(part in name for part in LEFT_WHOLE) for name in whole.keys() - cut)
    size_cut = sum(whole[name] for name in cut)
    assert max(held) <= sum(whole.values()) - size_cut + 0.505 * size_cut


def test_a_vocabulary_that_does_not_divide(tmp_path):
    """The last rank has fewer tokens; they are padded for the exchange."""
    subject = subject_of(tmp_path, "llama", vocab_size=321)
    two_ranks_equal_one(subject)


def test_dummy_weights_are_parts_of_the_whole(tmp_path):
    subject = subject_of(tmp_path, "qwen2_5_vl")
    whole = dict(subject.build(torch.float32, "dummy").named_parameters())
    for rank in range(2):
        model = whole_on_meta(subject)
        shares = split_of(subject, OneOf(rank, 2))(model)
        part = subject.build(torch.float32, "dummy", split=split_of(subject, OneOf(rank, 2)))
        for name, param in part.named_parameters():
            expected = shares[name].take(whole[name]) if name in shares else whole[name]
            assert torch.equal(param, expected), name


def test_sizes_that_do_not_divide_are_told_with_those_that_do(tmp_path):
    subject = subject_of(tmp_path, "qwen2_5_vl")
    message = "tensor_parallel_size = 3 does not divide 4 heads of attention.* use 1, 2, 4$"
    with pytest.raises(ConfigError, match=message):
        split_of(subject, OneOf(0, 3))(whole_on_meta(subject))


def test_a_tower_that_does_not_divide_stays_whole(tmp_path):
    """Four heads in the decoder, and a tower of three."""
    subject = subject_of(tmp_path, "qwen2_5_vl")
    subject.config.vision_config.num_heads = 3
    subject.config.vision_config.hidden_size = 48
    model = whole_on_meta(subject)
    shares = split_of(subject, OneOf(0, 2))(model)
    assert "visual.blocks.0.attn.qkv.weight" not in shares
    assert "visual.blocks.0.mlp.down_proj.weight" in shares
    assert model.visual.blocks[0].attn.num_heads == 3


@pytest.mark.full
def test_a_plugin_may_leave_its_tower_whole(tmp_path):
    plan = {"visual.*": "whole"}
    subject = subject_of(tmp_path, "qwen2_5_vl", {"tp_plan": plan})
    shares = split_of(subject, OneOf(0, 2))(whole_on_meta(subject))
    assert not [name for name in shares if name.startswith("visual")]
    two_ranks_equal_one(subject)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        ({"no.such.*": "whole"}, "matches none of its modules"),
        ({"*.mlp.down_proj": "whole"}, "has no partial module"),
        ({"model.norm": "rowwise-partial"}, "within 0 modules"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(tmp_path, plan, problem):
    subject = subject_of(tmp_path, "llama", {"tp_plan": plan})
    model = whole_on_meta(subject)
    with pytest.raises(PluginContractError, match=problem):
        split_of(subject, OneOf(0, 2))(model)


def test_a_model_without_a_plan_is_refused():
    with pytest.raises(ConfigError, match=r"odd cannot be divided: .*data_parallel_size"):
        divide(torch.nn.Linear(4, 4), {}, OneOf(0, 2), "odd")


def test_the_kit_finds_a_plan_that_is_wrong(tmp_path):
    """The output of attention is neither divided nor summed."""
    subject = subject_of(
        tmp_path, "llama", {"tp_plan": {"*.o_proj": "whole", "*.self_attn": "whole"}}
    )
    with pytest.raises((CheckFailed, RuntimeError)):
        two_ranks_equal_one(subject)


def test_the_kit_skips_what_cannot_be_divided(tmp_path):
    with pytest.raises(CheckSkipped, match="3 heads of attention"):
        two_ranks_equal_one(subject_of(tmp_path, "ernie4_5_vl_moe"))


def test_a_share_takes_its_ranges_in_order():
    share = Share(axis=1, ranges=((0, 1), (3, 5)))
    assert share.take(torch.arange(10).view(2, 5)).tolist() == [[0, 3, 4], [5, 8, 9]]


def test_a_rank_that_fails_ends_the_others():
    def work(ranks: ThreadRanks):
        if ranks.rank == 1:
            raise ValueError("rank 1 is at fault")
        return ranks.sum(torch.ones(2))

    with pytest.raises(ValueError, match="at fault"):
        on_ranks(thread_ranks(2), work)
