"""A whole job: plan, run, resume, report."""

import pytest

from mmdeploy_llm.batch.captioning import ReportSettings, plan_job, report_job, run_job
from mmdeploy_llm.batch.run import CaptionTask
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.params import SamplingParams

TASK = CaptionTask(prompt="Describe.", sampling_params=SamplingParams())


def job_for(folder, output, mode="new"):
    return plan_job([str(folder)], output, mode, TASK, is_recursive=False)


def test_results_are_in_the_order_of_the_inputs(pictures, tmp_path, fake_llm):
    job = job_for(pictures, tmp_path / "out.jsonl")
    result = run_job(job, lambda: fake_llm)
    assert tuple(record.path for record in result.records) == job.images
    assert result.num_failed == 1
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 4
    assert fake_llm.is_closed


def test_resume_does_only_what_is_missing_or_failed(pictures, tmp_path, fake_llm):
    output = tmp_path / "out.jsonl"
    run_job(job_for(pictures, output), lambda: fake_llm)
    (pictures / "bad.jpg").rename(pictures / "good.jpg")
    job = job_for(pictures, output, "resume")
    assert [path.rpartition("/")[2] for path in job.todo] == ["good.jpg"]
    result = run_job(job, lambda: fake_llm)
    assert result.summary.num_images == 1
    assert result.num_failed == 0
    assert len(result.records) == 4


def test_nothing_to_do_opens_no_model(pictures, tmp_path, fake_llm):
    output = tmp_path / "out.jsonl"
    (pictures / "bad.jpg").unlink()
    run_job(job_for(pictures, output), lambda: fake_llm)
    before = output.read_bytes()

    def open_llm():
        raise AssertionError("the model was opened")

    result = run_job(job_for(pictures, output, "resume"), open_llm)
    assert len(result.records) == 3
    assert output.read_bytes() == before


def test_a_model_that_cannot_be_opened_costs_no_old_output(pictures, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("precious\n")

    def open_llm():
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        run_job(job_for(pictures, output, "overwrite"), open_llm)
    assert output.read_text() == "precious\n"


def test_after_an_interruption_the_rest_is_left(pictures, tmp_path, png, fake_llm):
    (pictures / "3-stop.png").write_bytes(png)
    output = tmp_path / "out.jsonl"
    result = run_job(job_for(pictures, output), lambda: fake_llm)
    assert result.summary.is_interrupted
    assert [record.path.rpartition("/")[2] for record in result.records] == [
        "1.png",
        "2.png",
        "10.png",
    ]
    job = job_for(pictures, output, "resume")
    assert [path.rpartition("/")[2] for path in job.todo] == ["3-stop.png", "bad.jpg"]


def test_the_report_has_all_images_of_the_job(pictures, tmp_path, fake_llm):
    job = job_for(pictures, tmp_path / "out.jsonl")
    result = run_job(job, lambda: fake_llm)
    page = tmp_path / "out.html"
    about = ReportSettings(model="m", version="1", settings={"dtype": "auto"})
    report_job(job, result, page, about, lambda blob: b"jpeg")
    html = page.read_text()
    assert html.count("<article") == 4
    assert "images/s" in html
