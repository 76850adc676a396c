"""Conversations with encoded images and with clips, through the checkpoint's own chat template,
give the tokens of transformers' own model."""

import io

import pytest

from mmdeploy_llm import SamplingParams
from tests.together import begin_together

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def part(kind, source=None):
    """Returns a part of a message; without a source it has the form of transformers' templates."""
    return {"type": kind} if source is None else {"type": kind, kind: source}


def text(words):
    return {"type": "text", "text": words}


def png(picture):
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def conversations(chat_reference, make_picture, make_clip):
    """Returns, for each conversation, the contents of the user's message in order: texts, pictures
    and clips."""
    pictures = [make_picture(seed, *size) for seed, size in enumerate([(70, 90), (150, 60)])]
    found = [
        ["How many circles are there?"],
        [pictures[0], "What is it?"],
        ["First ", pictures[0], " then ", pictures[1], " which is larger?"],
    ]
    if chat_reference.has_videos:
        clips = [make_clip(1, 4, 70, 90, range(4)), make_clip(2, 5, 90, 60, range(5))]
        found += [
            [clips[0], "What moves?"],
            [clips[1], " and ", pictures[1], " and ", clips[0], " what changed?"],
        ]
    return found


def user_message(contents):
    """Returns the message as a caller of chat passes it: images as bytes of a file."""
    parts = []
    for item in contents:
        if isinstance(item, str):
            parts.append(text(item))
        elif hasattr(item, "frames"):
            parts.append({"type": "video", **item.item})
        else:
            parts.append(part("image", png(item)))
    return [{"role": "user", "content": parts}]


def wanted(reference, contents):
    """Returns transformers' tokens for the prompt that transformers renders."""
    clips = [item for item in contents if hasattr(item, "frames")]
    pictures = [item for item in contents if not isinstance(item, str) and item not in clips]
    parts = [
        text(item) if isinstance(item, str) else part("video" if item in clips else "image")
        for item in contents
    ]
    prompt = reference.tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    prompt = prompt.replace("<|image@placeholder|>", "<|IMAGE_PLACEHOLDER|>")
    prompt = prompt.replace("<|video@placeholder|>", "<|VIDEO_PLACEHOLDER|>")
    ids = reference.inputs(prompt, pictures, clips)["input_ids"][0].tolist()
    return ids, reference.generate(prompt, pictures, clips)


@pytest.mark.one_is_quick
def test_conversations(chat_reference, make_llm, conversations):
    llm, stats = make_llm(chat_reference.folder)
    begin_together(llm, len(conversations))
    outputs = llm.chat(
        [user_message(contents) for contents in conversations], GREEDY, use_tqdm=False
    )
    for contents, output in zip(conversations, outputs, strict=True):
        assert output.error_msg is None
        ids, tokens = wanted(chat_reference, contents)
        assert list(output.prompt_token_ids) == ids
        assert list(output.outputs.token_ids) == tokens
    assert max(step.num_scheduled_requests for step in stats.steps) > 1


@pytest.mark.one_is_quick
def test_counting_without_generating(chat_reference, make_llm, make_picture, make_clip):
    """Text around media, such as the times of frames, is counted too."""
    llm, _ = make_llm(chat_reference.folder)
    prompt = f"User: {chat_reference.image_text()} what is it?"
    media = {"image": [png(make_picture(0, 70, 90))]}
    if chat_reference.has_videos:
        prompt += f" and {chat_reference.video_text()}"
        media["video"] = [make_clip(1, 4, 70, 90, range(4)).item]
    request = {"prompt": prompt, "multimodal_data": media}
    [output] = llm.generate([request], GREEDY, use_tqdm=False)
    counted = llm.count_tokens(request)
    assert counted.num_prompt_tokens == len(output.prompt_token_ids)
    assert counted.num_input_image_tokens == output.num_input_image_tokens > 0
    assert counted.num_input_video_tokens == output.num_input_video_tokens
