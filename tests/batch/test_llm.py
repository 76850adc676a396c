"""LLM.run_batch with a real, tiny model."""

from functools import partial

import pytest
from PIL import Image
from typer.testing import CliRunner

from mmdeploy_llm import LLM, ConfigError, SamplingParams
from mmdeploy_llm.cli import app
from mmdeploy_llm.data.outputs.scan import read_records
from mmdeploy_llm.testing.tiny import write_tiny

PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_tiny("qwen2", tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)
    with LLM(
        model=str(folder), num_threads=1, kv_cache_memory=2**24, max_model_len=128, max_num_seqs=4
    ) as llm:
        yield llm


def test_an_iterable_of_dicts_goes_in_and_records_come_out(llm, tmp_path):
    out, page = tmp_path / "out.jsonl", tmp_path / "page.html"
    rows = [
        {"id": "a", "prompt": "The quick brown"},
        {"id": "ids", "prompt_token_ids": [40, 41, 42], "sampling_params": {"max_tokens": 2}},
        {"id": "n", "prompt": "The fox", "sampling_params": {"n": 2}},
        {"id": "long", "prompt": "fox " * 500},
        {"id": "both", "prompt": "x", "prompt_token_ids": [1]},
        {"id": "chat", "messages": [{"role": "user", "content": "Describe the picture."}]},
    ]
    summary = llm.run_batch(iter(rows), out, sampling_params=PARAMS, report=page, use_tqdm=False)
    records = {record.id: record for record in read_records(out)}
    assert set(records) == {row["id"] for row in rows}
    assert records["a"].num_output_tokens == 4
    assert records["ids"].num_output_tokens == 2
    assert [sample["index"] for sample in records["n"].outputs] == [0, 1]
    assert records["long"].failure == "400 PromptTooLongError"
    assert records["both"].failure == "400 RequestError"
    assert records["chat"].is_ok
    assert summary.failures == {"400 PromptTooLongError": 1, "400 RequestError": 1}
    assert page.read_text().count("<article") == 6
    single = llm.generate("The quick brown", PARAMS, use_tqdm=False)[0]
    assert records["a"].text == single.outputs.text.strip()


def test_ctrl_c_is_raised_when_the_output_is_closed(llm, tmp_path):
    out = tmp_path / "out.jsonl"

    def rows():
        for number in range(1000):
            if out.exists() and out.stat().st_size:
                raise KeyboardInterrupt
            yield {"prompt": f"The fox {number}"}

    with pytest.raises(KeyboardInterrupt):
        llm.run_batch(rows(), out, sampling_params=PARAMS, use_tqdm=False)
    num_done = len(list(read_records(out)))
    assert 0 < num_done < 1000
    answer = llm.generate("The fox", PARAMS, use_tqdm=False)[0]
    assert answer.is_ok
    again = [{"prompt": f"The fox {number}"} for number in range(20)]
    summary = llm.run_batch(again, out, resume=True, sampling_params=PARAMS, use_tqdm=False)
    assert summary.num_before == num_done


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resume": True, "overwrite": True}, "contradict"),
        ({"max_failures": 0}, "at least 1"),
        ({"shard": "3/2"}, "does not exist"),
        ({"limit": 0}, "at least 1"),
        ({"prompt": "What?"}, "a prompt for all"),
    ],
)
def test_a_wrong_call_raises_and_writes_nothing(llm, tmp_path, options, words, jsonl):
    out = tmp_path / "out.jsonl"
    with pytest.raises(ConfigError, match=words):
        llm.run_batch(jsonl({"prompt": "x"}), out, **options)
    assert not out.exists()


@pytest.mark.full
@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("family", "question"),
    [
        ("blip", " "),
        ("florence2", "<DETAILED_CAPTION>"),
        pytest.param("git", " ", marks=pytest.mark.full),
        pytest.param("kosmos2_5", "<ocr>", marks=pytest.mark.full),
        pytest.param("pix2struct", " ", marks=pytest.mark.full),
        pytest.param("pp_formulanet", " ", marks=pytest.mark.full),
        pytest.param("vision_encoder_decoder", " ", marks=pytest.mark.full),
    ],
)
def test_a_model_is_asked_what_its_family_reads(tiny_copy, tmp_path, family, question):
    """Who gives no question has it asked about files and rows with a picture, and counted."""
    model, folder, rows = tmp_path / "model", tmp_path / "pictures", tmp_path / "rows.csv"
    tiny_copy(family, model)
    (model / "chat_template.jinja").unlink()  # real ones have none
    folder.mkdir()
    Image.new("RGB", (64, 48), "red").save(folder / "a.png")
    rows.write_text("image\npictures/a.png\n")
    program = ["count", str(folder), "--model", str(model), "--total", "--json"]
    program += ["--engine", "max_model_len=128"]
    counts = [CliRunner().invoke(app, [*program, *more]) for more in ([], ["-p", question])]
    assert counts[0].stdout == counts[1].stdout
    assert counts[0].exit_code == 0
    with LLM(str(model), num_threads=1, max_model_len=128, quiet=True) as own:
        run = partial(own.run_batch, sampling_params=PARAMS, use_tqdm=False)
        for number, source in enumerate((folder, rows, folder)):
            given = {"prompt": question} if number == 2 else {}
            run(source, tmp_path / f"{number}.jsonl", **given)
    records = [next(read_records(tmp_path / f"{number}.jsonl")) for number in range(3)]
    assert len({(record.text, record.num_prompt_tokens) for record in records}) == 1
    assert all(record.is_ok for record in records)
