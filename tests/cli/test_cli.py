"""The program's commands, exit codes and plugins, with a fake LLM."""

import io
import json
import sys
import types
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from mmdeploy_llm import EngineConfig, MediaError, ModelNotSupportedError, RequestError, cli
from mmdeploy_llm.data.outputs.jsonl_writer import RecordWriter
from mmdeploy_llm.data.records.files import OutputLostError, OutputWriteError
from mmdeploy_llm.hooks import PluginManager, hookimpl
from mmdeploy_llm.hooks.discovery import CORE
from mmdeploy_llm.values.outputs.request_output import (
    CompletionOutput,
    Completions,
    RequestMetrics,
    RequestOutput,
    ToolCall,
)

PROGRAM = [sys.executable, "-c", "from mmdeploy_llm.cli import main; main()"]


@dataclass
class Answer:
    ask: object
    output: RequestOutput
    error: Exception | None


MANY = {"image": 16, "video": 4, "audio": 4}
# Of caption, by default.
BUDGETS = {"image_tokens": "auto", "video_tokens": "auto", "limit_mm_per_prompt": MANY}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class FakeLLM:
    """Echoes the prompt. The program builds it in place of LLM; `made` collects the instances."""

    death, num_dead = None, 0  # of its engine

    def __init__(self, made, model, **options):
        if model == "unserved":
            raise ModelNotSupportedError("no plugin serves 'UnknownModel'")
        assert options.pop("quiet"), "stderr is for what the command says"
        EngineConfig.from_options(model, options)  # unknown options raise, as in LLM
        self.options = options
        self.prompts = []
        self.handles = []
        self.params = None
        self.is_closed = False
        made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.is_closed = True

    def answer_each(self, asks):
        for ask in asks:
            prompt, self.params = ask.prompt, ask.params
            self.prompts.append(prompt)
            said = prompt.text or next(prompt.items).source.uri
            if "interrupt" in said:
                raise KeyboardInterrupt
            answer = output(prompt, said.rpartition("/")[2], is_ok="bad" not in said)
            yield Answer(ask=ask, output=answer, error=None)

    def count_tokens(self, prompt):
        raise RequestError("this model takes no pictures")

    def submit(self, prompt, sampling_params):
        self.handles.append(FakeHandle(self.stream(prompt, sampling_params)))
        return self.handles[-1]

    def stream(self, prompt, sampling_params=None):
        self.prompts.append(prompt)
        self.params = sampling_params
        said = prompt.get("prompt") or prompt["messages"][-1]["content"][-1]["text"]
        if said == "raise":
            raise MediaError("that image cannot be read")
        if said == "interrupt":
            raise KeyboardInterrupt
        if said == "fail":
            yield output(prompt, "", is_ok=False)
            return
        if said in ("cut", "cut thinking"):
            text, thought = ("I", None) if said == "cut" else ("", "I th")
            yield output(prompt, text, thought=thought, finish_reason="length")
            return
        if said == "call":
            yield output(prompt, "", calls=(ToolCall(name="f", arguments='{"x": "é"}', id="c"),))
            return
        for index, (thought, text) in enumerate(
            [("I th", ""), ("ink.", "\n"), ("", "you said: "), ("", said)]
        ):
            yield output(prompt, text, thought=thought, index=index)


class FakeHandle:
    """Iterates outputs; `abort` stops them."""

    def __init__(self, outputs):
        self.outputs, self.is_aborted = outputs, False

    def __iter__(self):
        return self.outputs

    def abort(self):
        self.is_aborted = True


def output(prompt, text, *, is_ok=True, thought=None, index=0, calls=None, finish_reason=None):
    completion = CompletionOutput(
        text=text if is_ok else "",
        reasoning_content=thought,
        token_ids=[3],
        send_idx=index,
        tool_calls=calls,
        finish_reason=finish_reason,
    )
    return RequestOutput(
        request_id="r",
        prompt=None,
        item=prompt,
        prompt_token_ids=[1, 2],
        outputs=Completions([completion]),
        finished=True,
        metrics=RequestMetrics(arrival_time=0, model_execute_time=0.5),
        error_code=200 if is_ok else 400,
        error_msg=None if is_ok else "it cannot be read",
    )


@pytest.fixture
def made(monkeypatch):
    """The list of fake LLMs that the program has opened."""
    llms = []
    module = types.ModuleType("mmdeploy_llm.client.llm")
    module.LLM = module.AsyncLLM = lambda model, **options: FakeLLM(llms, model, **options)
    for name in ("llm", "aio.async_llm"):
        monkeypatch.setitem(sys.modules, f"mmdeploy_llm.client.{name}", module)
    return llms


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Returns a function that runs the program in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(cli.PLUGINS_VARIABLE, raising=False)
    monkeypatch.delenv(cli.BLOCKED_VARIABLE, raising=False)
    return lambda *words, **options: CliRunner().invoke(cli.app, list(words), **options)


@pytest.fixture
def pictures(tmp_path):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    for name in ("pics", "unserved"):
        (tmp_path / name).mkdir()
    (tmp_path / "unserved" / "config.json").write_text("{}")
    for name in ("a.png", "b.png"):
        (tmp_path / "pics" / name).write_bytes(buffer.getvalue())
    return tmp_path / "pics"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestCaption:
    def test_all_good(self, run, made, pictures, tmp_path):
        result = run("caption", "pics")
        assert result.exit_code == 0, result.output
        assert [record["text"] for record in lines(tmp_path / "captions.jsonl")] == [
            "a.png",
            "b.png",
        ]
        assert "data:image/jpeg;base64," in (tmp_path / "captions.html").read_text()
        assert "2 captioned, 0 failed" in result.stdout
        assert "captions.jsonl" in result.stdout
        assert "captions.html" in result.stdout
        assert made[0].is_closed

    @pytest.mark.full
    def test_what_is_not_read_is_told_in_summary_report_and_list(
        self, run, made, pictures, tmp_path
    ):
        (pictures / "notes.txt").write_text("no picture")
        (pictures / "b.png").rename(pictures / "draft_b.png")
        given = ("pics", "--exclude", "draft_*", "--exclude", "x/", "--skipped", "skipped.jsonl")
        words = "skipped 2 files: 1 .txt, 1 by --exclude draft_*"
        for command in (("caption",), ("batch", "--report", "captions.html", "-o", "b.jsonl")):
            result = run(*command, *given)
            assert result.exit_code == 0, result.output
            assert words in result.stdout
            assert "--exclude 'x/' fits nothing" in result.stdout
            assert words in (tmp_path / "captions.html").read_text()
        assert {(own["skipped"], own["kind"]) for own in lines(tmp_path / "skipped.jsonl")} == {
            ("pics/notes.txt", ".txt"),
            ("pics/draft_b.png", "by --exclude draft_*"),
        }
        (tmp_path / "mine.txt").write_text("mine")
        result = run("caption", "pics", "-o", "c.jsonl", "--skipped", "mine.txt")
        assert result.exit_code == 2
        assert "no list of skipped files" in result.stderr
        assert (tmp_path / "mine.txt").read_text() == "mine"
        assert not (tmp_path / "c.jsonl").exists()

    def test_a_batch_over_a_glob_of_pictures(self, run, made, pictures, tmp_path):
        (pictures / "sub").mkdir()
        (pictures / "a.png").rename(pictures / "sub" / "a.png")
        result = run("batch", "pics/**/*.png", "-o", "out.jsonl")
        assert result.exit_code == 0, result.output
        ids = sorted(record["id"] for record in lines(tmp_path / "out.jsonl"))
        assert ids == ["b.png", "sub/a.png"]

    def test_options_of_folders_are_refused_for_a_corpus(self, run, made, tmp_path):
        (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
        result = run("batch", "in.jsonl", "-o", "out.jsonl", "--exclude", "*.tmp")
        assert result.exit_code == 2
        assert "are for folders and files of media" in result.stderr

    def test_some_failed(self, run, made, pictures, tmp_path):
        (pictures / "bad.png").write_bytes(b"broken")
        result = run("caption", "pics", "--table")
        assert result.exit_code == 1
        assert "1 failed: their lines say why" in result.stdout
        assert "failed (400): it cannot be read" in result.stdout
        assert lines(tmp_path / "captions.jsonl")[2]["error"] == {
            "code": 400,
            "class": "RequestError",
            "message": "it cannot be read",
        }

    def test_options_reach_the_model(self, run, made, pictures, tmp_path):
        (tmp_path / "t.jinja").write_text("{{ messages }}")
        result = run(
            *("caption", "pics", "--no-thinking", "--prompt", "Which shapes?"),
            *("--max-tokens", "9", "--temperature", "0.5", "--dtype", "float32"),
            *("--max-num-seqs", "3", "--reasoning-parser", "qwen3", "--num-threads", "1"),
            *("--engine", "max-model-len=512", "--engine", "chat_template=t.jinja"),
            *("--output", "out/x.jsonl", "--report", "out/y.html"),
        )
        assert result.exit_code == 0, result.output
        assert made[0].options == {
            "dtype": "float32",
            "device": "auto",
            "max_num_seqs": 3,
            "num_threads": 1,
            "reasoning_parser": "qwen3",
            "max_model_len": 512,
            "chat_template": "t.jinja",
            "tool_call_parser": "auto",
            **BUDGETS,
        }
        prompt = made[0].prompts[0]
        assert prompt.template_kwargs == {"enable_thinking": False}
        assert prompt.messages[0].text == "Which shapes?"
        assert (made[0].params.max_tokens, made[0].params.temperature) == (9, 0.5)
        page = (tmp_path / "out" / "y.html").read_text()
        assert "max_model_len" in page
        assert "Which shapes?" in page

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize(
        ("choice", "option"),
        [("auto", {"reasoning_parser": "auto"}), ("none", {})],
    )
    def test_the_reasoning_parser_is_the_models_own_unless_asked(
        self, run, made, pictures, choice, option
    ):
        assert run("caption", "pics", "--reasoning-parser", choice).exit_code == 0
        assert made[0].options == {
            "dtype": "auto",
            "device": "auto",
            "tool_call_parser": "auto",
            **BUDGETS,
            **option,
        }

    def test_no_report(self, run, made, pictures, tmp_path):
        assert run("caption", "pics", "--no-report").exit_code == 0
        assert not (tmp_path / "captions.html").exists()

    def test_an_old_output_needs_a_decision(self, run, made, pictures, tmp_path):
        run("caption", "pics/a.png")
        refused = run("caption", "pics")
        assert refused.exit_code == 2
        assert "--resume" in refused.stderr
        assert len(made) == 1
        assert run("caption", "pics", "--resume").exit_code == 0
        assert [len(llm.prompts) for llm in made] == [1, 1]
        assert len(lines(tmp_path / "captions.jsonl")) == 2
        again = run("caption", "pics", "--resume")
        assert again.exit_code == 0
        assert "nothing left to do" in again.stdout
        assert len(made) == 2
        assert run("caption", "pics", "--overwrite").exit_code == 0
        assert len(made[2].prompts) == 2

    def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(self, run, made, pictures, tmp_path):
        (pictures / "b-interrupt.png").write_bytes(b"")
        result = run("caption", "pics/a.png", "pics/b-interrupt.png", "pics/b.png")
        assert result.exit_code == 130
        assert "stopped with 2 left" in result.stderr
        assert "--resume" in result.stderr
        assert len(lines(tmp_path / "captions.jsonl")) == 1
        assert made[0].is_closed

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["caption", "nowhere"], "does not exist"),
            (["caption", "pics", "--overwrite", "--resume"], "contradict"),
            (["caption", "pics", "--model", "unserved"], "no plugin serves"),
            (["caption", "pics", "--model", "pics"], "has no config.json"),
            (["caption", "pics", "--engine", "nonsense"], "NAME=VALUE"),
            (["caption", "pics", "--engine", "max_model_length=3"], "did you mean 'max_model_len'"),
            (["caption", "pics", "--output", "pics", "--format", "jsonl"], "is a folder"),
            (["caption", "pics", "--output", "pics/a.png/x.jsonl"], "pics/a.png"),
        ],
    )
    def test_a_usage_error_is_one_line_and_exit_code_2(self, run, made, pictures, words, message):
        result = run(*words)
        assert result.exit_code == 2
        assert message in result.stderr
        assert "Traceback" not in result.output
        *told, error = result.stderr.splitlines()
        assert error.startswith("error: ")
        has_begun = "--model" in words  # the options are right, and the model is looked at last
        assert [line.partition(" ")[0] for line in told] == ["starting"] * has_begun

    def test_debug_shows_the_traceback(self, run, made, pictures):
        result = run("--debug", "caption", "pics", "--model", "unserved")
        assert isinstance(result.exception, ModelNotSupportedError)

    @pytest.mark.full
    def test_names_cannot_steer_the_terminal(self, run, made, pictures):
        (pictures / "c\x1b[31m.png").write_bytes(b"")
        result = run("caption", "pics", "--table")
        assert "\x1b" not in result.stdout
        assert "\ufffd[31m" in result.stdout


class TestBatch:
    @pytest.fixture(autouse=True)
    def _lines(self, tmp_path):
        rows = [{"id": "a", "prompt": "one"}, {"prompt": "bad"}, {"prompt": "three", "odd": 1}]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "in.jsonl").write_text(text + "no json\n")

    def test_every_line_has_its_record_and_failures_are_counted_by_kind(self, run, made, tmp_path):
        result = run("batch", "in.jsonl", "--output", "out.jsonl")
        assert result.exit_code == 1, result.output
        records = {record["line"]: record for record in lines(tmp_path / "out.jsonl")}
        assert {line: record["id"] for line, record in records.items()} == {
            1: "a",
            2: 2,
            3: 3,
            4: None,
        }
        assert records[1]["text"] == "one"
        assert "1 done, 3 failed" in result.stdout
        assert "3 x 400 RequestError" in result.stdout
        assert not list(tmp_path.glob("*.html"))

    def test_options_are_defaults_for_lines(self, run, made, tmp_path):
        row = {"prompt": "one", "sampling_params": {"temperature": 0.5}}
        (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
        words = ("--max-tokens", "7", "--temperature", "0", "--sampling", "top_k=3")
        result = run("batch", "in.jsonl", "-o", "out.jsonl", *words, "--report", "page.html")
        assert result.exit_code == 0, result.output
        params = made[0].params
        assert (params.max_tokens, params.temperature, params.top_k) == (7, 0.5, 3)
        assert made[0].options["limit_mm_per_prompt"] == MANY
        assert "one" in (tmp_path / "page.html").read_text()

    def test_a_folder_is_asked_about_file_by_file(self, run, made, pictures, tmp_path):
        result = run("batch", "pics", "-o", "out.jsonl", "--prompt", "Which?", "--thinking")
        assert result.exit_code == 0, result.output
        assert [record["id"] for record in lines(tmp_path / "out.jsonl")] == ["a.png", "b.png"]
        assert made[0].prompts[0].messages[0].text == "Which?"
        assert made[0].prompts[0].template_kwargs == {"enable_thinking": True}

    def test_shards_and_limit_choose_lines(self, run, made, tmp_path):
        rows = "".join(json.dumps({"prompt": f"p{number}"}) + "\n" for number in range(1, 11))
        (tmp_path / "in.jsonl").write_text(rows)
        for shard in (1, 2, 3):
            words = ("-o", f"out{shard}.jsonl", "--shard", f"{shard}/3", "--limit", "8")
            assert run("batch", "in.jsonl", *words).exit_code == 0
        texts = [[r["text"] for r in lines(tmp_path / f"out{n}.jsonl")] for n in (1, 2, 3)]
        assert texts == [["p1", "p4", "p7"], ["p2", "p5", "p8"], ["p3", "p6"]]

    def test_too_many_failures_stop_it_and_resume_goes_on(self, run, made, tmp_path):
        rows = [{"prompt": text} for text in ("one", "bad", "bad", "four")]
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        stopped = run("batch", "in.jsonl", "-o", "out.jsonl", "--max-failures", "2")
        assert stopped.exit_code == 3
        assert "stopped by --max-failures with 1 left" in stopped.stderr
        kept = run("batch", "in.jsonl", "-o", "out.jsonl", "--resume", "--no-retry-failed")
        assert kept.exit_code == 1
        assert [prompt.text for prompt in made[1].prompts] == ["four"]
        again = run("batch", "in.jsonl", "-o", "out.jsonl", "--resume")
        assert again.exit_code == 1
        assert [prompt.text for prompt in made[2].prompts] == ["bad", "bad"]
        assert sorted(record["line"] for record in lines(tmp_path / "out.jsonl")) == [1, 2, 3, 4]

    def test_a_lost_output_and_a_full_disk_end_with_code_3(self, run, made, tmp_path, monkeypatch):
        (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "one"}) + "\n")
        for error in (OutputLostError("it is in 'saved'"), OutputWriteError(28, "no space")):

            def lose(*_, error=error):
                raise error

            monkeypatch.setattr(RecordWriter, "write", lose)
            result = run("batch", "in.jsonl", "-o", "out.jsonl", "--resume")
            assert result.exit_code == 3
            assert (getattr(error, "strerror", None) or str(error)) in result.stderr
            assert "finished items are saved" not in result.stderr

    def test_items_without_a_result_end_with_code_3(self, run, made, tmp_path, monkeypatch, caplog):
        rows = [{"prompt": text} for text in ("one", "two", "three")]
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        real = FakeLLM.answer_each

        def some(self, asks):
            yield from islice(real(self, asks), 2)

        monkeypatch.setattr(FakeLLM, "answer_each", some)
        result = run("batch", "in.jsonl", "-o", "out.jsonl")
        assert result.exit_code == 3, result.output
        assert "the run ended before all items of the input were read" in caplog.text
        assert "1 left; the same command with --resume does them" in result.stderr

    @pytest.mark.full
    def test_a_page_that_is_no_report_is_refused_before_the_model_loads(self, run, made, tmp_path):
        (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "one"}) + "\n")
        for page in ("in.jsonl", "/dev/null"):
            result = run("batch", "in.jsonl", "-o", "out.jsonl", "--report", page)
            assert result.exit_code == 2
        run("batch", "in.jsonl", "-o", "out.jsonl")
        assert len(made) == 1
        assert run("report", "out.jsonl", "-o", "/dev/null").exit_code == 2
        assert run("report", "out.jsonl", "-o", "out.jsonl").exit_code == 2
        assert len(lines(tmp_path / "out.jsonl")) == len(lines(tmp_path / "in.jsonl")) == 1

    @pytest.mark.full
    def test_a_report_that_fails_comes_after_the_summary(self, run, made, tmp_path, monkeypatch):
        (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "one"}) + "\n")

        def full(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("mmdeploy_llm.batch.report.whole.report_batch", full)
        result = run("batch", "in.jsonl", "-o", "out.jsonl", "--report", "out.html")
        assert result.exit_code == 2
        assert "1 done, 0 failed" in result.stdout
        assert "out.html" not in result.stdout
        assert "No space left" in result.stderr

    def test_ctrl_c_says_how_to_go_on(self, run, made, tmp_path):
        rows = [{"prompt": text} for text in ("one", "interrupt", "three")]
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        result = run("batch", "in.jsonl", "-o", "out.jsonl")
        assert result.exit_code == 130
        assert "stopped with 2 left; the same command with --resume" in result.stderr
        assert [record["id"] for record in lines(tmp_path / "out.jsonl")] == [1]

    def test_nothing_but_bad_lines_opens_no_model(self, run, made, tmp_path):
        (tmp_path / "in.jsonl").write_text("no json\n[]\n")
        assert run("batch", "in.jsonl", "-o", "out.jsonl").exit_code == 1
        assert made == []
        assert len(lines(tmp_path / "out.jsonl")) == 2

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["nowhere.jsonl"], "does not exist"),
            (["in.jsonl", "--shard", "0/4"], "the first is 1/4"),
            (["in.jsonl", "--shard", "half"], "such as 1/4"),
            (["in.jsonl", "--prompt", "What?"], "has its own prompt"),
            (["in.jsonl", "--no-retry-failed"], "needs --resume"),
            (["in.jsonl", "--sampling", "temprature=1"], "did you mean 'temperature'"),
            (["in.jsonl", "--sampling", "top_p"], "NAME=VALUE"),
            (["in.jsonl", "--output", "in.jsonl"], "is the input"),
        ],
    )
    def test_a_usage_error_is_one_line_and_exit_code_2(self, run, made, words, message):
        output = () if "--output" in words else ("--output", "out.jsonl")
        result = run("batch", *output, *words)
        assert result.exit_code == 2
        assert message in result.stderr
        assert result.stderr.startswith("error: ")
        assert made == []

    def test_help_says_what_lines_and_exit_codes_are(self, run):
        text = run("batch", "--help-all").stdout
        told = ("multimodal_data", "class and message", "3 stopped by --max-failures", "--resume")
        for words in told:
            assert words in text


class TestGenerate:
    def test_text_on_stdout_reasoning_on_stderr(self, run, made):
        result = run("generate", "Hello [bold]you[/bold]")
        assert result.exit_code == 0, result.output
        assert result.stdout == "you said: Hello [bold]you[/bold]\n"
        assert result.stderr == "I think.\n"
        assert made[0].options["limit_mm_per_prompt"] == {"image": 1}

    def test_images_go_first(self, run, made, tmp_path):
        (tmp_path / "a.png").touch()
        (tmp_path / "b.png").touch()
        run("generate", "What?", "--image", "a.png", "--image", "b.png", "--thinking")
        assert made[0].prompts == [
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "image": "a.png"},
                            {"type": "image", "image": "b.png"},
                            {"type": "text", "text": "What?"},
                        ],
                    }
                ],
                "chat_template_kwargs": {"enable_thinking": True},
            }
        ]
        assert made[0].options["limit_mm_per_prompt"] == {"image": 2}

    def test_raw_prompts_pass_as_they_are(self, run, made, tmp_path):
        (tmp_path / "a.png").touch()
        run("generate", "-", "--raw", "--image", "a.png", input="Once upon")
        assert made[0].prompts == [{"prompt": "Once upon", "multimodal_data": {"image": ["a.png"]}}]

    def test_a_failure_is_exit_code_1(self, run, made):
        result = run("generate", "fail")
        assert result.exit_code == 1
        assert result.stderr == "error: it cannot be read\n"

    def test_what_the_length_cut_off_is_said(self, run, made):
        result = run("generate", "cut")
        assert (result.exit_code, result.stdout) == (0, "I\n")
        assert "the answer is cut off; raise --max-tokens" in result.stderr
        result = run("generate", "cut thinking")
        assert (result.exit_code, result.stdout) == (4, "")
        assert "the thinking took all of it; raise --max-tokens" in result.stderr

    def test_an_error_of_the_call_is_exit_code_2(self, run, made):
        assert run("generate", "raise").exit_code == 2

    def test_tools_go_in_and_calls_come_out(self, run, made, tmp_path):
        (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
        result = run("generate", "call", "--tools", "tools.json", "--tool-call-parser", "hermes")
        assert result.exit_code == 0, result.output
        assert made[0].prompts[0]["tools"] == [TOOL]
        assert made[0].options["tool_call_parser"] == "hermes"
        assert json.loads(result.stdout) == {"name": "f", "arguments": '{"x": "é"}'}

    @pytest.mark.parametrize(("choice", "option"), [("auto", "auto"), ("none", None)])
    def test_the_tool_parser_is_the_models_own_unless_asked(self, run, made, choice, option):
        run("generate", "hi", "--tool-call-parser", choice)
        assert made[0].options.get("tool_call_parser") == option

    def test_a_file_of_tools_that_is_no_json(self, run, made, tmp_path):
        (tmp_path / "tools.json").write_text("def f(): ...")
        result = run("generate", "hi", "--tools", "tools.json")
        assert result.exit_code == 2
        assert "tools.json' cannot be read as JSON" in result.stderr
        assert made == []


class TestChat:
    def test_lines_of_a_pipe(self, run, made):
        words = (
            "hello\n\n/image 'my cat.png'\nwho is it?\nsure?\n/reset\nagain\n/what\n/quit\nnever\n"
        )
        result = run("chat", "--system", "Be brief.", input=words)
        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines() == [
            "you said: hello",
            "you said: who is it?",
            "you said: sure?",
            "you said: again",
        ]
        first, second, sure, third = (prompt["messages"] for prompt in made[0].prompts)
        assert [message["role"] for message in first] == ["system", "user"]
        assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
        assert second[2]["content"] == "you said: hello"
        assert second[3]["content"][0] == {"type": "image", "image": "my cat.png"}
        assert [part["type"] for part in sure[-1]["content"]] == ["text"]
        assert [message["role"] for message in third] == ["system", "user"]
        assert len(third[1]["content"]) == 1
        assert "/image PATH" in result.stderr

    def test_calls_stay_in_the_conversation(self, run, made, tmp_path):
        (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
        result = run("chat", "--tools", "tools.json", input="call\nso?\n")
        assert json.loads(result.stdout.splitlines()[0])["name"] == "f"
        prompt = made[0].prompts[1]
        assert prompt["tools"] == [TOOL]
        function = {"name": "f", "arguments": '{"x": "é"}'}
        assert prompt["messages"][1]["tool_calls"] == [
            {"id": "c", "type": "function", "function": function}
        ]

    def test_one_message(self, run, made, tmp_path):
        (tmp_path / "a.png").touch()
        result = run("chat", "--message", "hi", "--image", "a.png", "--no-thinking")
        assert result.stdout == "you said: hi\n"
        assert made[0].prompts[0]["chat_template_kwargs"] == {"enable_thinking": False}
        assert len(made[0].prompts[0]["messages"][0]["content"]) == 2

    @pytest.mark.parametrize(("bad", "message"), [("fail", "it cannot"), ("raise", "that image")])
    def test_a_failed_message_is_forgotten(self, run, made, bad, message):
        result = run("chat", input=f"hello\n{bad}\nstill here?\n")
        assert result.exit_code == 1
        assert f"error: {message}" in result.stderr
        assert "you said: still here?" in result.stdout
        assert len(made[0].prompts[-1]["messages"]) == 3

    def test_ctrl_c_ends_the_answer_and_not_the_session(self, run, made):
        result = run("chat", input="hello\ninterrupt\nstill here?\n")
        assert result.exit_code == 0, result.output
        assert "stopped" in result.stderr
        assert "you said: still here?" in result.stdout
        assert [handle.is_aborted for handle in made[0].handles] == [False, True, False]
        assert len(made[0].prompts[-1]["messages"]) == 3


class PluginWithCommands:
    """Adds a command, and tries to replace a built-in one."""

    @hookimpl
    def extend_cli(self, app):
        app.command("greet")(greet)
        app.command("version")(greet)


def greet(name: str) -> None:
    """Greet someone."""
    typer.echo(f"hello {name}")


class BrokenPlugin:
    """Raises when it should add its commands."""

    @hookimpl
    def extend_cli(self, app):
        raise RuntimeError("no commands today")


@pytest.fixture
def plugged(monkeypatch):
    """Returns a function that makes the program load these plugins as if another package had
    installed them."""

    def plug(*plugins):
        manager = PluginManager()
        for plugin in plugins:
            manager.register(plugin, type(plugin).__name__)
        monkeypatch.setattr(cli.program, "load_plugins", lambda **chosen: manager)
        monkeypatch.setattr(cli.program, "has_other_plugins", lambda: True)

    return plug


class TestPlugins:
    def test_a_plugin_adds_a_command(self, run, plugged):
        plugged(PluginWithCommands())
        assert run("greet", "you").stdout == "hello you\n"
        assert "Greet someone." in run("--help").stdout

    def test_a_built_in_command_stays(self, run, plugged):
        plugged(PluginWithCommands())
        assert run("version").stdout == f"{cli.program.__version__}\n"
        assert run("--help").stdout.count("  version ") == 1

    def test_an_unknown_command_is_a_usage_error(self, run, plugged):
        plugged(PluginWithCommands())
        assert run("gret").exit_code == 2

    def test_the_list(self, run):
        result = run("plugins")
        assert result.exit_code == 0
        for words in ("reasoning", "mmdeploy-llm", "reasoning parser ernie-45-vl"):
            assert words in result.stdout

    def test_the_list_as_json(self, run):
        found = {plugin["name"]: plugin for plugin in json.loads(run("plugins", "--json").stdout)}
        assert {"ernie", "qwen", "reasoning", "sources"} <= set(found)
        assert "reasoning parser qwen3" in found["reasoning"]["provides"]

    def test_failures_are_shown_and_strict_counts_them(self, run, plugged):
        plugged(BrokenPlugin())
        for words in ([], ["--json"]):
            result = run("plugins", *words)
            assert result.exit_code == 0
            assert "no commands today" in result.stdout
        assert run("plugins", "--strict").exit_code == 1

    def test_strict_is_content_without_failures(self, run, plugged):
        plugged(PluginWithCommands())
        assert run("plugins", "--strict").exit_code == 0

    def test_a_broken_plugin_does_not_break_help(self, run, plugged):
        plugged(BrokenPlugin())
        result = run("--help")
        assert result.exit_code == 0
        assert "caption" in result.stdout

    def test_the_environment_selects_plugins(self, run, made, monkeypatch, pictures):
        monkeypatch.setenv(cli.PLUGINS_VARIABLE, "ernie, sources")
        monkeypatch.setenv(cli.BLOCKED_VARIABLE, "qwen")
        names = [plugin["name"] for plugin in json.loads(run("plugins", "--json").stdout)]
        assert [name for name in names if name not in CORE] == ["ernie", "sources"]
        run("caption", "pics")
        assert made[0].options["plugins"] == ("ernie", "sources")
        assert made[0].options["blocked_plugins"] == ("qwen",)

    @pytest.mark.parametrize(
        "words", [("caption", "pics"), ("generate", "Hello"), ("count", "-p", "Hello")]
    )
    def test_files_and_choices(self, run, made, monkeypatch, pictures, words):
        source = "from mmdeploy_llm.hooks import hookimpl\n@hookimpl\ndef on_step(): ..."
        Path("my.py").write_text(source)
        seen = []
        monkeypatch.setattr(
            "mmdeploy_llm.client.counting.TokenCounter",
            lambda model, **options: seen.append(options) or sys.exit(),
        )
        run(*words, "--plugin", "my.py", "--use", "qwen3=reasoning", "--use", "image=qwen")
        options = seen[0] if seen else made[0].options
        assert options["plugin_files"] == [Path("my.py")]
        assert options["use"] == ["qwen3=reasoning", "image=qwen"]

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize(
        ("value", "words", "option"),
        [
            ("/fast/disk", (), "/fast/disk"),
            ("off", (), False),
            ("", (), None),
            ("off", ("--engine", "weight_cache=/other"), "/other"),
        ],
    )
    def test_the_environment_places_the_weight_cache(
        self, run, made, monkeypatch, pictures, value, words, option
    ):
        monkeypatch.setenv(cli.CACHE_VARIABLE, value)
        run("caption", "pics", *words)
        assert made[0].options.get("weight_cache") == option

    def test_an_empty_variable_means_none(self, run, monkeypatch):
        monkeypatch.setenv(cli.PLUGINS_VARIABLE, "")
        found = [plugin["name"] for plugin in json.loads(run("plugins", "--json").stdout)]
        assert tuple(found) == CORE

    def test_a_wrong_name_in_the_environment_is_an_error(self, run, monkeypatch):
        monkeypatch.setenv(cli.PLUGINS_VARIABLE, "source")
        result = run("plugins")
        assert result.exit_code == 2
        assert "did you mean 'sources'" in result.stderr


def test_version(run):
    assert run("--version").stdout == run("version").stdout == f"{cli.program.__version__}\n"


def test_without_a_command_it_prints_help(run):
    result = run()
    assert result.exit_code == 0
    assert "Examples:" in result.stdout


def test_every_command_explains_itself(run):
    for command in ("caption", "batch", "generate", "chat", "plugins", "version"):
        result = run(command, "--help")
        assert result.exit_code == 0
        assert "Usage:" in result.stdout


@pytest.mark.parametrize("words", [["--help"], ["caption", "--help"], ["batch", "--help-all"]])
def test_help_has_examples(run, words):
    assert "Examples:" in run(*words).stdout
