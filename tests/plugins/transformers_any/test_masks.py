"""Prompts whose tokens see each other in both directions: all of a prompt (PaliGemma), or all media
of it (Molmo 2), equal transformers."""

import pytest
import torch
import transformers
from mmdeploy_llm_plugins.transformers_any import ANY, masks, trial
from mmdeploy_llm_plugins.transformers_media import processor

from mmdeploy_llm import SamplingParams
from mmdeploy_llm.errors import UnsupportedMediaError
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.testing.checkpoint import write_checkpoint
from mmdeploy_llm.testing.model_conformance import build
from tests.together import begin_together

from .conftest import Family, Reference, text_fields, vision_fields, write

# transformers' processor of PaliGemma makes arrays of tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
GREEDY, LONG = (
    SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (10, 30)
)
TIGHT = {"block_size": 4, "num_gpu_blocks_override": 17, "max_model_len": 64}
TEXT, SIZES = "The quick brown fox", ((70, 50), (30, 64))


def paligemma(tokenizer, **text):
    return transformers.PaliGemmaConfig(
        text_config={
            "model_type": "gemma2",
            **text_fields(head_dim=16, sliding_window=8, query_pre_attn_scalar=20),
            "tie_word_embeddings": False,
            **text,
        },
        vision_config=transformers.SiglipVisionConfig(**vision_fields()).to_dict(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=64,
        tie_word_embeddings=False,  # else each token is followed by itself
    )


PALIGEMMA = Family(
    "PaliGemmaForConditionalGeneration",
    paligemma,
    "<image>",
    {"image_token": "<image>"},
    image_processor={
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": 28, "width": 28},
        "image_seq_length": 16,
    },
    processor={"processor_class": "PaliGemmaProcessor"},
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """PaliGemma 2, whose windows are shorter than an image."""
    return Reference(PALIGEMMA, write(PALIGEMMA, tmp_path_factory.mktemp("paligemma")))


def prompts_of(picture):
    """Returns (our text, transformers' text, images): it writes the begin of the text and a line's
    end itself."""
    one, two = (picture(seed, *size) for seed, size in enumerate(SIZES))
    return [
        (TEXT, TEXT, []),
        ("<image><s>caption en\n", "<image>caption en", [one]),
        ("<image><image><s>what is it?\n", "<image><image>what is it?", [one, two]),
    ]


def answers(llm, found, params=GREEDY):
    given = [
        {"prompt": ours, "multimodal_data": {"image": images}} if images else ours
        for ours, _, images in found
    ]
    outputs = llm.generate(given, params, use_tqdm=False)
    assert [output.error_msg for output in outputs] == [None] * len(found)
    return [list(output.outputs.token_ids) for output in outputs]


@pytest.mark.full
def test_a_whole_prompt_sees_itself(reference, make_llm, picture):
    """It does so in a batch and again, and in a pool that holds few of them."""
    found = prompts_of(picture)
    expected = [reference.generate(theirs, images) for _, theirs, images in found]
    llm, stats = make_llm(reference.folder)
    begin_together(llm, len(found))
    assert answers(llm, found) == answers(llm, found) == expected
    assert max(step.num_scheduled_requests for step in stats.steps) > 1
    assert answers(make_llm(reference.folder, **TIGHT)[0], found * 2) == expected * 2


@pytest.mark.full
def test_preempted_prompts_are_computed_whole_again(tmp_path, make_llm, picture):
    """They are so in few bits, too. PaliGemma 1 has no windows, for which a tight pool would take
    one request at a time."""

    def first(tokenizer):
        return paligemma(tokenizer, model_type="gemma", sliding_window=None)

    made = Reference(PALIGEMMA, write(PALIGEMMA, tmp_path, first))
    found = [("<image><s>caption en\n", "", [picture(seed, *SIZES[0])]) for seed in range(4)]
    for quantization in (None, "wint8"):
        wide, tight = (
            answers(make_llm(made.folder, quantization=quantization, **options)[0], found, LONG)
            for options in ({}, TIGHT)
        )
        assert wide == tight
        if quantization is None:
            expected = [made.generate("<image>caption en", images) for _, _, images in found]
            assert [ids[: GREEDY.max_tokens] for ids in tight] == expected


@pytest.mark.full
def test_text_without_the_mask_is_another(reference, make_llm, picture, monkeypatch):
    """The mask matters in this model, so the test above can fail."""
    found = prompts_of(picture)[1:]
    expected = [reference.generate(theirs, images) for _, theirs, images in found]
    monkeypatch.setattr("mmdeploy_llm.engine.runner.forward_pass.spans_of_prompts", lambda *_: ())
    llm, _ = make_llm(reference.folder)
    assert answers(llm, found) != expected


@pytest.mark.full
def test_a_prompt_is_computed_in_one_step(reference, make_llm, picture):
    llm, _ = make_llm(reference.folder, max_num_batched_tokens=24, max_num_seqs=4)
    found = prompts_of(picture)
    (output,) = llm.generate(
        [{"prompt": found[2][0], "multimodal_data": {"image": found[2][2]}}], GREEDY
    )
    assert "24" in output.error_msg  # two images have 32 tokens
    assert answers(llm, found[:1]) == [reference.generate(TEXT)]


def unlimited_ocr():
    """Unlimited-OCR with windows of three tokens after the prompt."""
    sparse = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
    sparse |= {"n_shared_experts": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    sam = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 48}
    sam |= {"image_size": 32, "patch_size": 2, "global_attn_indexes": [0], "output_channels": 16}
    return transformers.UnlimitedOcrConfig(
        text_config=text_fields(sliding_window=3, num_key_value_heads=4, **sparse),
        vision_config={
            "sam_config": {**sam, "downsample_channels": [16, 32]},
            "encoder_config": vision_fields(),
        },
        architectures=["UnlimitedOcrForConditionalGeneration"],
    )


@pytest.mark.full
def test_the_answer_sees_the_prompt_and_its_last_tokens(tmp_path, make_llm, monkeypatch):
    """Unlimited-OCR: in a batch, again, after preemption. It has no processor here, so the prompts
    are of text."""

    def no_images(*_):
        raise UnsupportedMediaError("needs torchvision")

    monkeypatch.setattr(processor, "load_processor", no_images)
    folder = write_checkpoint(unlimited_ocr(), tmp_path)
    kind = transformers.UnlimitedOcrForConditionalGeneration
    model = kind.from_pretrained(folder, attn_implementation="eager").eval()
    prompts = [[45, 59, 33, 47], [301, 52, 105, 77, 9, 8]]
    expected = [
        model.generate(
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    tight = {"block_size": 4, "num_gpu_blocks_override": 5, "max_model_len": 16}
    for options in ({}, tight):
        llm, _ = make_llm(folder, **options)
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [output.error_msg for output in outputs] == [None] * 2
            assert [list(output.outputs.token_ids) for output in outputs] == expected


IDS = {
    "image_patch_id": 120,
    "image_start_token_id": 121,
    "image_end_token_id": 122,
    "low_res_image_start_token_id": 123,
    "frame_start_token_id": 124,
    "frame_end_token_id": 125,
}
COLUMN = 126  # no field of the config names it
IMAGE = [123, 120, 120, COLUMN, 122, 121, 120, COLUMN, 120, COLUMN, 122]
PROMPT = [7, 8, *IMAGE, 9, 10, *IMAGE, 11, 12]


def molmo2():
    text = text_fields(head_dim=16)
    vision = vision_fields(image_size=[28, 28], num_key_value_heads=2, head_dim=16)
    return transformers.Molmo2Config(
        text_config=text,
        vision_config=vision,
        adapter_config={
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 48,
            "text_hidden_size": 64,
            "vision_feature_layer": [1, 0],
        },
        **IDS,
    )


def test_types_of_molmo2s_tokens():
    ids = torch.tensor([*PROMPT, 120, COLUMN])
    in_prompt = torch.tensor([True] * len(PROMPT) + [False, False])
    types = masks.types_of("Molmo2ForConditionalGeneration", molmo2(), ids, in_prompt)
    media = [1] * len(IMAGE)
    assert types.tolist() == [0, 0, *media, 0, 0, *media, 0, 0, 0, 0]


def picture_of(seed):
    """Returns the tensors of an image: two low tokens, two of crops, each of four patches."""
    made = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(2, 16, 147, generator=made),
        "image_token_pooling": torch.randint(0, 32, (4, 4), generator=made),
        "image_grids": torch.tensor([[1, 2, 2, 1]]),
    }


@pytest.mark.full
def test_all_images_of_a_prompt_see_each_other(tmp_path):
    """Molmo 2: also across text; then a token is generated. Its image processor needs torchvision,
    so the tensors are made up."""
    torch.manual_seed(0)
    model = transformers.Molmo2ForConditionalGeneration(molmo2()).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    pictures, ids = [picture_of(1), picture_of(2)], torch.tensor([*PROMPT, 30])
    types = masks.types_of(
        "Molmo2ForConditionalGeneration", model.config, ids, torch.ones(len(ids)).bool()
    )
    with torch.inference_mode():
        expected = model(
            input_ids=ids[None],
            mm_token_type_ids=types[None],
            **{name: torch.cat([one[name] for one in pictures]) for name in pictures[0]}
            | {
                "image_token_pooling": torch.cat(
                    [one["image_token_pooling"] + 32 * i for i, one in enumerate(pictures)]
                )
            },
        ).logits[0]
    ours, memory = build(ANY, tmp_path, model.config, torch.float32), trial.Memory()
    assert ours.sees_prompts
    assert ours.attends_itself
    items = [
        MediaInput(kind="image", tensors=one, num_tokens=4, key=str(i))
        for i, one in enumerate(pictures)
    ]
    found = []
    with torch.inference_mode():
        embeds = torch.cat(list(ours.encode_media(items)))
        for start, end in ((0, len(PROMPT)), (len(PROMPT), len(ids))):
            memory.begin(start, end)
            rows = (ids[start:end] == IDS["image_patch_id"]).nonzero()[:, 0]
            inputs = ForwardInputs(
                token_ids=ids[start:end],
                positions=torch.arange(start, end),
                in_prompt=torch.full((end - start,), start == 0),
                attn=memory,
                media_rows=rows if len(rows) else None,
                media_embeds=embeds if len(rows) else None,
            )
            found.append(ours.logits(ours.forward(inputs)))
    assert (torch.cat(found) - expected).abs().max() < 1e-4
