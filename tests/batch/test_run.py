"""The loop from paths to records."""

import os

from mmdeploy_llm.batch.run import CaptionTask, caption_images
from mmdeploy_llm.params import SamplingParams

TASK = CaptionTask(
    prompt="What is it?",
    sampling_params=SamplingParams(temperature=0, max_tokens=7),
    chat_template_kwargs={"enable_thinking": True},
)


def run(llm, paths, **options):
    records = []
    summary = caption_images(llm, paths, TASK, records.append, **options)
    return summary, records


def test_every_path_gets_its_own_record(fake_llm):
    paths = [f"{number}.png" for number in range(5)]
    summary, records = run(fake_llm, paths)
    assert sorted(record.path for record in records) == paths
    assert all(record.text == f"a caption of {record.path}" for record in records)
    assert [record.path for record in records] == ["1.png", "0.png", "3.png", "2.png", "4.png"]
    assert (summary.num_images, summary.num_failed, summary.num_output_tokens) == (5, 0, 15)
    assert not summary.is_interrupted
    assert summary.images_per_second > 0
    assert summary.tokens_per_second > summary.images_per_second


def test_one_bad_image_harms_no_other(fake_llm):
    summary, records = run(fake_llm, ["a.png", "bad.png", "c.png"])
    assert summary.num_failed == 1
    assert [record.path for record in records if not record.is_ok] == ["bad.png"]


def test_the_prompt_asks_for_one_image_through_the_template(fake_llm):
    run(fake_llm, ["data:a.png"])
    content = [
        {"type": "image", "image": os.path.abspath("data:a.png")},
        {"type": "text", "text": "What is it?"},
    ]
    assert fake_llm.prompts == [
        {
            "messages": [{"role": "user", "content": content}],
            "chat_template_kwargs": {"enable_thinking": True},
        }
    ]
    assert fake_llm.params is TASK.sampling_params


def test_prompts_are_taken_only_when_the_engine_wants_them(fake_llm):
    taken_at_first_record = []
    caption_images(
        fake_llm,
        [f"{number}.png" for number in range(100)],
        TASK,
        lambda record: taken_at_first_record.append(fake_llm.num_taken),
    )
    assert taken_at_first_record[0] == 2


def test_interruption_keeps_what_is_done(fake_llm):
    summary, records = run(fake_llm, ["a.png", "b.png", "c.png", "stop.png", "e.png"])
    assert summary.is_interrupted
    assert [record.path for record in records] == ["b.png", "a.png"]
    assert summary.num_images == 2


def test_the_bar_is_shown_when_asked_and_counts(fake_llm, capsys):
    run(fake_llm, ["a.png", "bad.png"], is_progress_shown=True)
    shown = capsys.readouterr()
    assert "2/2" in shown.err
    assert "1 failed" in shown.err
    assert shown.out == ""


def test_no_bar_in_a_log_file(fake_llm, capsys):
    run(fake_llm, ["a.png"])
    assert capsys.readouterr().err == ""
