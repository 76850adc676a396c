"""A resumed run compares its input with the results: items whose input has changed are done again
and counted once; another configuration is refused by name."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdeploy_llm import LLM, ConfigError, SamplingParams
from mmdeploy_llm.batch.engine import NOT_COMPARED, describe_engine
from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.cli import app
from mmdeploy_llm.data.files.options import FindingOptions
from mmdeploy_llm.data.outputs.jsonl_writer import RecordWriter
from mmdeploy_llm.data.outputs.scan import read_records, scan
from mmdeploy_llm.data.records.configuration import Configuration
from mmdeploy_llm.data.records.identity import digest_of, model_digest
from mmdeploy_llm.data.records.outcome import NOTHING, Retried
from mmdeploy_llm.data.records.record import ItemError, Record
from mmdeploy_llm.testing.tiny import write_tiny
from mmdeploy_llm.values.options.config import EngineConfig


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


@pytest.fixture
def do(fake_llm, out):
    """Runs a batch with the fake model; returns its summary and the prompts that were done."""

    def run(given, mode="resume", **values):
        before = len(fake_llm.prompts)
        job = plan_batch(given, out, BatchSettings(mode=mode, **values))
        summary = run_batch(job, lambda: fake_llm)
        return summary, fake_llm.prompts[before:]

    return run


def ids(out):
    return sorted(record.id for record in read_records(out))


def rows(*texts):
    return [{"id": f"item-{number}", "prompt": text} for number, text in enumerate(texts)]


def test_a_changed_line_is_done_again_and_counted_once(do, out):
    do(rows("a", "b", "c"), "new")
    summary, prompts = do(rows("a", "B", "c", "d"))
    assert [prompt.text for prompt in prompts] == ["B", "d"]
    assert (summary.num_before, summary.num_again, summary.num_records) == (2, 1, 4)
    assert ids(out) == ["item-0", "item-1", "item-2", "item-3"]
    assert len(out.read_bytes().splitlines()) == 4
    texts = {record.id: record.text for record in read_records(out)}
    assert texts["item-1"] == "a caption of B"
    assert do(rows("a", "B", "c", "d"))[1] == []


def test_the_progress_bar_counts_an_item_once(do, capsys):
    do(rows("a", "b", "c"), "new")
    do(rows("a", "B", "C"), use_tqdm=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "5/3" not in shown


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "user", "content": "other"}]},
        {"sampling_params": {"max_tokens": 3}},
        {"chat_template_kwargs": {"x": 1}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"multimodal_data": {"image": "b.png"}},
    ],
)
def test_every_part_of_a_line_counts(change):
    line = {"id": "a", "prompt": "x", "multimodal_data": {"image": "a.png"}}
    assert digest_of(line) != digest_of({**line, **change})
    assert digest_of(line) == digest_of(dict(reversed(line.items())))


def test_a_changed_file_is_done_again(do, out, pictures):
    do(pictures, "new")
    assert do(pictures, retried=NOTHING)[1] == []
    (pictures / "2.png").write_bytes(b"bytes of another length")
    os.utime(pictures / "10.png", ns=(1, 1))
    _, prompts = do(pictures, retried=NOTHING)
    names = [Path(next(prompt.items).source.uri).name for prompt in prompts]
    assert names == ["2.png", "10.png"]
    assert len(ids(out)) == len(out.read_bytes().splitlines()) == len(set(ids(out)))


def test_a_changed_file_of_a_line_is_done_again(do, jsonl, tmp_path, kinds_of):
    finding = FindingOptions(table=kinds_of({"kind": "chart"}))
    (tmp_path / "x y.png").write_bytes(b"1")
    forms = ["x y.png", str(tmp_path / "x y.png"), (tmp_path / "x y.png").as_uri()]
    lines = [{"prompt": "p", "multimodal_data": {"image": [form]}} for form in forms]
    lines += [{"prompt": "p", "multimodal_data": {"chart": form}} for form in forms]
    source = jsonl({"prompt": "without a file"}, *lines)
    do(source, "new", finding=finding)
    assert do(source, finding=finding)[1] == []
    (tmp_path / "x y.png").write_bytes(b"22")
    assert len(do(source, finding=finding)[1]) == len(lines)


def test_objects_of_a_python_program_are_compared_as_far_as_they_can_be():
    array = np.zeros((2, 3), np.uint8)
    same = digest_of(array)
    assert same == digest_of(array.copy())
    assert same == digest_of(np.zeros((4, 3), np.uint8)[::2])  # not contiguous
    for other in (array + 1, array.reshape(3, 2), array.astype(np.int16), bytes(6), array[:0]):
        assert digest_of(other) != same
    assert digest_of(b"a") != digest_of("a") != digest_of(Path("b"))
    embeds = [{"image_embeds": torch.zeros(4, 8), "grid": (1, 4, 4)} for _ in range(2)]
    assert digest_of(embeds[0]) == digest_of(embeds[1])
    assert digest_of(embeds[0]) != digest_of({**embeds[0], "image_embeds": torch.zeros(5, 8)})
    assert digest_of([["a"], "b"]) != digest_of([["a", "b"]])
    assert digest_of(1) != digest_of("1") != digest_of(True)
    assert digest_of(object()) == digest_of(object())
    with Path(__file__).open("rb") as file:
        assert digest_of(file)  # not read
        assert file.tell() == 0


def test_a_line_that_became_wrong_is_an_error_now_and_a_mended_one_is_done(do, out):
    do(rows("a", "b"), "new")
    bad = [{"id": "item-0", "prompt": "a"}, {"id": "item-1", "promt": "b"}]
    summary, _ = do(bad)
    assert summary.failures == {"400 RequestError": 1}
    assert len(ids(out)) == 2
    assert do(bad, retried=NOTHING)[0].run.num_items == 0
    summary, prompts = do(rows("a", "b"), retried=NOTHING)
    assert len(prompts) == 1
    assert (summary.num_failed, summary.num_records) == (0, 2)


OTHERS = [
    ({"sampling_params": SamplingParams(max_tokens=9)}, "sampling_params.max_tokens is not set"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "enable_thinking is not set, was True"),
    ({"question": "What?"}, r"prompt is not set, was 'What\?'"),
    (
        {"describe_engine": lambda: Configuration(model="other", values={"model": "0"})},
        r"the files of the model differ \('mine' now, 'other' then\)",
    ),
    (
        {"describe_engine": lambda: Configuration(model="mine", values={"model": 1, "dtype": "x"})},
        "dtype is 'auto', the default of LLM, was 'x'",
    ),
]


def mine():
    return Configuration(model="mine", values={"model": 1})


@pytest.mark.one_is_quick
@pytest.mark.parametrize(("values", "words"), OTHERS)
def test_another_configuration_is_refused_by_name(do, out, pictures, values, words):
    own = {"describe_engine": mine, "retried": NOTHING}
    do(pictures, "new", **{**own, **values})
    before = out.read_bytes()
    with pytest.raises(ConfigError, match=f"another configuration: .*{words}.*--resume-anyway"):
        do(pictures, **own)
    assert out.read_bytes() == before


@pytest.mark.full
def test_results_of_another_configuration_are_kept_when_they_are_wanted(do, out):
    first = {"describe_engine": mine}
    second = {"sampling_params": SamplingParams(max_tokens=5), **first}
    do(rows("a", "b"), "new", **first)
    _, prompts = do(rows("a", "changed", "c"), is_any_config_kept=True, **second)
    assert [prompt.text for prompt in prompts] == ["changed", "c"]
    assert len({record.config_digest for record in read_records(out)}) == 2
    assert do(rows("a", "changed", "c"), **second)[1] == []  # was allowed once
    with pytest.raises(ConfigError, match="max_tokens is not set, was 5"):
        do(rows("a", "changed", "c"), **first)
    Path(f"{out}.config.json").unlink()
    with pytest.raises(ConfigError, match=r"config.json' is missing, so the differences cannot"):
        do(rows("a", "changed", "c"), **second)
    do(rows("a"), "overwrite", **second)
    assert list(json.loads(Path(f"{out}.config.json").read_text())) == [
        record.config_digest for record in read_records(out)
    ]


def test_values_that_json_cannot_hold_are_compared_by_their_type(do, out):
    first = {"describe_engine": lambda: Configuration(values={"x": object(), "y": {1, 2}})}
    do(rows("a"), "new", **first)
    assert do(rows("a"), **first)[1] == []
    second = {"describe_engine": lambda: Configuration(values={"x": Path("p"), "y": {1, 2}})}
    with pytest.raises(ConfigError, match=r"x is '<PosixPath>', was '<object>'"):
        do(rows("a"), **second)


def test_failures_of_another_configuration_do_not_matter(do, out):
    do(rows("bad", "bad"), "new", describe_engine=mine)
    other = {"sampling_params": SamplingParams(max_tokens=5)}
    assert len(do(rows("bad", "good"), **other)[1]) == 2


@pytest.mark.one_is_quick
@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"a": {"values": {}}}', "[" * 10**5])
def test_a_file_of_configurations_that_is_none_is_refused(do, out, text):
    do(rows("a"), "new", describe_engine=mine)
    Path(f"{out}.config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config.json' does not hold the configurations"):
        do(rows("a"))


STATES = st.tuples(st.sampled_from("abc"), st.booleans(), st.sampled_from(["", "1", "2"]))


@pytest.mark.full
@settings(max_examples=150, deadline=None)
@given(states=st.lists(STATES, max_size=12), cut=st.integers(0, 40), is_again=st.booleans())
def test_any_output_has_one_record_of_each_item_after_a_resume(
    states, cut, is_again, tmp_path_factory
):
    out = tmp_path_factory.mktemp("any") / "out.jsonl"
    records = [
        Record(id=name, text=str(number), item_digest=digest)
        if is_ok
        else Record(
            id=name,
            text=str(number),
            error=ItemError(code=400, kind="RequestError", message="no"),
        )
        for number, (name, is_ok, digest) in enumerate(states)
    ]
    data = "".join(record.to_json() + "\n" for record in records).encode()
    out.write_bytes(data[: len(data) - cut] if cut < len(data) else data)
    whole = records[: out.read_bytes().count(b"\n")]
    last = {record.id: record for record in whole}
    assert {record.id: record for record in read_records(out)} == last
    assert len(list(read_records(out))) == len(last)
    kept = scan(out, lambda _: 1, retried=Retried.parse(is_again))
    with RecordWriter(out, "resume", kept) as writer:
        writer.finish(lambda _: 1)
    left = [record for record in last.values() if record.is_ok or not is_again]
    found = [Record.from_json(line) for line in out.read_bytes().splitlines()]
    assert sorted(record.id for record in found) == sorted(record.id for record in left)
    assert {record.id: record for record in found} == {record.id: record for record in left}
    assert len(kept.index) == len(left)
    assert all(kept.done.has(record.id, record.item_digest) for record in left)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny("qwen2", tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


def test_names_of_options_that_are_not_compared_exist():
    assert set(EngineConfig.model_fields) >= NOT_COMPARED


def test_an_engine_is_described_by_what_decides_its_answers(model, tmp_path):
    def describe(**options):
        return describe_engine(EngineConfig.from_options(str(model), options))

    plain = describe()
    assert describe(max_num_seqs=2, num_threads=1, device="cpu", media_timeout=9).values == (
        plain.values
    )
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    template = {"chat_template": str(tmp_path / "t.jinja")}
    others = [{"dtype": "float32"}, {"seed": 7}, template, {"tokenizer": str(model)}]
    assert len({describe(**other).digest for other in others} | {plain.digest}) == 5
    before = describe(**template).digest
    (tmp_path / "t.jinja").write_text("{{ messages|length }}")
    assert describe(**template).digest != before


def test_other_files_of_a_model_are_noticed_and_another_place_is_not(model, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    before = model_digest(copy)
    assert before == model_digest(model)
    os.mkfifo(copy / "x.json")  # is not waited for
    (copy / "y.json").symlink_to("nowhere")
    (copy / "z.json").mkdir()
    assert model_digest(copy) == before
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)  # another training, the same size
    weights.write_bytes(data)
    assert model_digest(copy) != before


@pytest.mark.full
def test_python_and_the_program_refuse_and_go_on(model, jsonl, out, tmp_path):
    source = jsonl({"prompt": "The fox"}, {"prompt": "The dog"})
    options = {"num_threads": 1, "kv_cache_memory": 2**24, "max_model_len": 128}
    with LLM(model=str(model), **options) as llm:

        def run(resume, **params):
            sampling = SamplingParams(temperature=0, **params)
            return llm.run_batch(
                source, out, resume=resume, sampling_params=sampling, use_tqdm=False
            )

        run(False, max_tokens=2)
        with pytest.raises(ConfigError, match=r"max_tokens is 3, was 2.*resume=\"anyway\""):
            run(True, max_tokens=3)
        assert run("anyway", max_tokens=3).run.num_items == 0
        assert run(True, max_tokens=2).run.num_items == 0
        with pytest.raises(ConfigError, match="resume must be True, False or 'anyway'"):
            run("always")
    words = ["batch", str(source), "-o", str(out), "--model", str(model), "--max-tokens", "4"]
    words += ["--temperature", "0", "--engine", "max_model_len=128", "--num-threads", "1"]
    from typer.testing import CliRunner

    refused = CliRunner().invoke(app, [*words, "--resume"])
    assert refused.exit_code == 2
    assert "--max-tokens is 4, was 2" in refused.stderr
    done = CliRunner().invoke(app, [*words, "--resume-anyway"])
    assert done.exit_code == 4, done.output
    assert "2 x truncated" in done.output
    assert "nothing left to do" in done.stdout


@pytest.mark.full
def test_a_run_killed_while_it_does_changed_items_again(do, out, in_child):
    """It has written new records and not removed the old ones yet."""
    do(rows(*"abcdef"), "new")

    def killed():
        for number, row in enumerate(rows(*"ABCDEF")):
            if number == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            yield row

    assert in_child(lambda: do(killed())) == -signal.SIGKILL
    assert len(out.read_bytes().splitlines()) == 10
    texts = {record.id: record.text[-1] for record in read_records(out)}
    assert texts == {f"item-{number}": text for number, text in enumerate("ABCDef")}
    summary, prompts = do(rows(*"ABCDEF"))
    assert [prompt.text for prompt in prompts] == ["E", "F"]
    assert (summary.num_records, summary.num_before) == (6, 4)
    assert len(out.read_bytes().splitlines()) == 6


def test_the_digest_of_a_gguf_model(tmp_path):
    """Another model in the same folder does not matter."""
    (tmp_path / "a.gguf").write_bytes(bytes(100))
    before = model_digest(tmp_path / "a.gguf")
    assert before == model_digest(tmp_path)
    (tmp_path / "b.gguf").write_bytes(bytes(100))
    assert model_digest(tmp_path / "a.gguf") == before
    assert model_digest(tmp_path / "b.gguf") != before
    (tmp_path / "a.gguf").write_bytes(bytes(99) + b"x")
    assert model_digest(tmp_path / "a.gguf") != before
