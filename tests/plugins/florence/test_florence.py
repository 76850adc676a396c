"""Florence-2 against transformers: the model with the checks of every family, its images, prompts
and whole answers."""

from dataclasses import replace

import pytest
import torch
import transformers
from mmdeploy_llm_plugins import florence
from mmdeploy_llm_plugins.florence import BOXES as RULE
from mmdeploy_llm_plugins.florence.image import FlorenceImageProcessor
from mmdeploy_llm_plugins.florence.model import Florence2ForConditionalGeneration
from mmdeploy_llm_plugins.florence.prompts import (
    TASKS,
    TASKS_WITH_INPUT,
    FlorencePrompts,
    question,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.florence2.processing_florence2 import Florence2Processor

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import (
    MediaError,
    ModelNotSupportedError,
    PromptTooLongError,
    RequestError,
)
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.media.boxes.reading import find_boxes
from mmdeploy_llm.media.loading.kinds import TEXTS, ModelMedia
from mmdeploy_llm.testing import MediaProcessorConformance, ModelConformance
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.plugins.encoder_answers import EncoderAnswersInAllSettings
from tests.plugins.pictures import picture

(SPEC,) = florence.provide_models()
(IMAGES,) = florence.provide_media_processors()


@pytest.mark.full
class TestModel(ModelConformance):
    spec = SPEC


def theirs(folder):
    """Returns transformers' processor of the folder, on Pillow alone."""
    return Florence2Processor(
        image_processor=CLIPImageProcessorPil.from_pretrained(folder),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
    )


def item(num_tokens=17, key="a"):
    return MediaInput(kind="image", tensors={}, num_tokens=num_tokens, key=key)


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("florence2")


@pytest.fixture(scope="module")
def rule(folder):
    return FlorencePrompts(read_checkpoint(folder))


@pytest.mark.parametrize("where", ["", "text_config"])
def test_several_tables_of_embeddings_are_refused(folder, where):
    """Each part of the model would have one of its own."""
    config = read_checkpoint(folder).config
    (getattr(config, where) if where else config).tie_word_embeddings = False
    with pytest.raises(ModelNotSupportedError, match=r"one table of embeddings.*False"):
        Florence2ForConditionalGeneration(config)


def test_pixels_and_tokens_equal_those_of_transformers(folder):
    processor = FlorenceImageProcessor(read_checkpoint(folder), {})
    made = processor.prepare(picture(1), {})
    expected = theirs(folder)(text="<OD>", images=picture(1), return_tensors="pt")
    assert torch.equal(made.tensors["pixel_values"], expected["pixel_values"])
    count = int((expected["input_ids"] == theirs(folder).image_token_id).sum())
    assert made.text == processor.token * count


@pytest.mark.one_is_quick
@pytest.mark.parametrize("task", [*TASKS, *TASKS_WITH_INPUT])
def test_the_encoder_reads_what_transformers_makes_of_a_task(folder, rule, task):
    given = "<loc_1><loc_2><loc_5><loc_6>" if task.startswith("<REGION_TO") else " a red circle"
    text = task if task in TASKS else f"{task}{given}"
    processor = theirs(folder)
    ids = processor(text=text, images=picture(1), return_tensors="pt")["input_ids"][0]
    own = rule.divide(text, (), (item(),), lambda text: processor.tokenizer.encode(text))
    assert own.items[0].tensors["input_ids"].tolist() == ids[17:].tolist()
    assert own.items[0].num_tokens == len(ids)
    assert question(f"<image>{text}") == question(text) != text


def test_a_prompt_that_no_task_takes(rule):
    with pytest.raises(RequestError, match=r"<OD> takes no further text, found '<OD> cats'"):
        question("<OD> cats")
    with pytest.raises(RequestError, match="<REGION_TO_OCR> needs a text after it"):
        question("<REGION_TO_OCR>")
    with pytest.raises(MediaError, match="one image in each prompt, found 0"):
        rule.divide("<OD>", (), (), len)
    assert rule.divide(None, [7] * (256 - 17), (item(),), len).items[0].num_tokens == 256
    with pytest.raises(PromptTooLongError, match=r"240 tokens and the image 17.* takes 256"):
        rule.divide(None, [7] * (256 - 16), (item(),), len)


def test_the_key_of_an_item_holds_the_question(rule):
    keys = {
        rule.divide(text, (), (item(key=key),), lambda text: [len(text)]).items[0].key
        for text in ("<OD>", "<OCR>")
        for key in "ab"
    }
    assert len(keys) == 4
    assert rule.divide("<OD>", (), (item(key=""),), lambda text: []).items[0].key == ""


def test_the_decoder_begins_as_generation_config_says(folder):
    given = {"decoder_start_token_id": 5, "forced_bos_token_id": 0}
    checkpoint = replace(read_checkpoint(folder), generation=given)
    assert FlorencePrompts(checkpoint).divide(None, [7], (item(),), len).ids == (5, 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("car<loc_100><loc_200><loc_300><loc_400>", [("car", 10.05, 40.1, 30.05, 80.1)]),
        (
            "car<loc_0><loc_0><loc_10><loc_10><loc_500><loc_500><loc_900><loc_900>door<loc_1>"
            "<loc_2><loc_3><loc_4>",
            [
                ("car", 0.05, 0.1, 1.05, 2.1),
                ("car", 50.05, 100.1, 90.05, 180.1),
                ("door", 0.15, 0.5, 0.35, 0.9),
            ],
        ),
        (  # text: four corners, clockwise from the upper left one
            "</s><s>EXIT<loc_10><loc_20><loc_90><loc_21><loc_91><loc_60><loc_11><loc_59>",
            [("EXIT", 1.05, 4.1, 9.15, 12.1)],
        ),
        (  # a mask: a polygon of five points, then one of eight
            "<loc_50><loc_10><loc_90><loc_40><loc_70><loc_90><loc_30><loc_90><loc_10><loc_40>"
            "<sep><loc_5><loc_1><loc_7><loc_1><loc_9><loc_3><loc_9><loc_6><loc_7><loc_9>"
            "<loc_5><loc_9><loc_2><loc_6><loc_2><loc_3>",
            [("", 1.05, 2.1, 9.05, 18.1), ("", 0.25, 0.3, 0.95, 1.9)],
        ),
        ("car<loc_100><loc_200><loc_300>", []),
        (  # an odd number of a polygon's numbers, of which the last ones are missing
            "<loc_50><loc_10><loc_10><loc_40><loc_70><loc_90><loc_30><loc_90><loc_10>",
            [],
        ),
    ],
)
def test_location_tokens_are_boxes(text, expected):
    found = find_boxes(text, RULE, (100, 200))
    assert [(box.label, box.x0, box.y0, box.x1, box.y1) for box in found.boxes] == expected
    assert found.num_unread == (not expected)


ONE = "<loc_0><loc_0><loc_10><loc_10>"
BACK = "<loc_900><loc_500><loc_700><loc_800>"


@pytest.mark.parametrize(
    ("text", "prompt", "num_boxes"),
    [
        (ONE + BACK, "<OD>", 2),
        (BACK + ONE, "Q: <OD>", 2),
        (ONE + BACK, "<OCR_WITH_REGION>", 1),
        (ONE + ONE, "<REGION_TO_SEGMENTATION><loc_1><loc_1><loc_9><loc_9>", 1),
        (ONE + BACK + ONE * 2, "<OD>", 4),
        (ONE + BACK + ONE * 2, "Where is a car?", 4),
        (BACK + ONE * 3, "<OPEN_VOCABULARY_DETECTION>car", 4),
        (ONE * 2, "", 2),
    ],
)
def test_one_box_that_runs_back_does_not_change_the_others(text, prompt, num_boxes):
    """It is the box between its corners, as transformers keeps it. The task says what kind of boxes
    answer it; else most of them do."""
    found = find_boxes(f"car{text}", RULE, (100, 200), None, prompt)
    assert (len(found.boxes), found.num_unread) == (num_boxes, 0)
    sizes = {(box.x0, box.y0, box.x1, box.y1) for box in found.boxes}
    if BACK in text and num_boxes > 1:
        assert sizes == {(0.05, 0.1, 1.05, 2.1), (70.05, 100.1, 90.05, 160.1)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<DETAILED CAPTION>", "<DETAILED CAPTION> is not known; there are .*<DETAILED_CAPTION>"),
        ("<REGION_TO_OCR><loc_1><loc_2><loc_3>", "needs a region after it"),
        ("<REGION_TO_OCR>the sign", "needs a region after it.*found 'the sign'"),
        ("<REGION_TO_OCR><loc_1><loc_2><loc_3><loc_1000>", "no <loc_1000>, only <loc_0> to"),
    ],
)
def test_questions_that_nobody_understands_are_refused(text, message):
    with pytest.raises(RequestError, match=message):
        question(text)


SAMPLING = SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=24, ignore_eos=True)


def test_a_checkpoint_without_a_chat_template_has_one(rule):
    """Published ones have none, and captioning asks in conversations."""
    assert ModelMedia(encoder=rule).template == TEXTS
    assert ModelMedia().template is None


@pytest.mark.full
class TestAnswers(EncoderAnswersInAllSettings):
    prompts = (
        ("<CAPTION>", (0,)),
        ("<OD>", (1,)),
        ("<OCR>", (2,)),
        ("Where is a circle?", (0,)),
        ("<CAPTION>", (0,)),
    )
    num_different = 4
    repetition_penalty = 1.3
    tight = (3, 40)
    few = 60 * 2 * 3 * 64 * 4  # bytes: two items of about 27 tokens

    @classmethod
    def reference(cls, folder):
        processor = theirs(folder)
        model = transformers.Florence2ForConditionalGeneration.from_pretrained(folder).eval()
        return model, lambda text, pictures: processor(
            text=text, images=pictures[0], return_tensors="pt"
        )


def test_conversations_and_counts(folder):
    options = {"kv_cache_memory": 2**22, "use_warmup": False}
    with LLM(str(folder), dtype="float32", **options) as llm:
        asked = {"prompt": "<OD>", "multimodal_data": {"image": picture(1)}}
        count = llm.count_tokens({**asked, "prompt": "<CAPTION>"})
        assert count.num_input_image_tokens == 17
        assert count.num_input_tokens_by_kind == {"image": 17, "text": 21}  # the encoder's question
        parts = [{"type": "image", "image": picture(1)}, {"type": "text", "text": "<OD>"}]
        (told,) = llm.chat([{"role": "user", "content": parts}], SAMPLING, chat_template=TEXTS)
        (expected,) = llm.generate([asked], SAMPLING)
        assert told.outputs.token_ids == expected.outputs.token_ids
        counted = llm.count_tokens(asked).num_input_tokens_by_kind
        assert told.num_input_tokens_by_kind == counted
        wrong = llm.generate({"prompt": "<OD>"}, SAMPLING)[0]
        assert (wrong.error_code, "one image" in wrong.error_msg) == (400, True)


@pytest.mark.full
class TestImages(MediaProcessorConformance):
    spec = IMAGES
    other_options = {"do_normalize": False}  # noqa: RUF012 - never written to
