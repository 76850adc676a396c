"""A fake LLM that answers from file names, and small image files."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from mmdeploy_llm.engine.desk.outcome import Answer
from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.values.outputs.request_output import (
    CompletionOutput,
    Completions,
    RequestMetrics,
    RequestOutput,
)
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.prompt import PromptParts


class Loaded:
    """Stands for LLM with an engine that never dies."""

    plugins = runtime = num_kv_blocks = death = None
    num_dead = 0

    def revive(self) -> None:
        raise AssertionError("no engine has died")

    restart = count_tokens = get_tokenizer = revive

    def find_boxes(self, prompt, text):
        raise AssertionError("no boxes are asked for")


class FakeLLM(Loaded):
    """Answers prompts in pairs, the later one first. A prompt with "bad" fails; at one with "stop"
    the user presses Ctrl-C. `num_taken` counts prompts pulled from the iterable."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.prompts: list[PromptParts] = []
        self.params: list[SamplingParams] = []
        self.is_closed = False
        self.is_aborted = False

    def answer_each(self, asks: Iterable) -> Iterator[Answer]:
        batch: list = []
        try:
            for ask in asks:
                self.num_taken += 1
                self.prompts.append(ask.prompt)
                self.params.append(ask.params)
                batch.append(ask)
                if len(batch) == 2:
                    yield from self._answers(batch)
                    batch = []
            yield from self._answers(batch)
        except GeneratorExit:
            self.is_aborted = True
            raise

    def _answers(self, batch: list) -> Iterator[Answer]:
        for ask in reversed(batch):
            output = self.answer(ask.prompt, ask.params.n)
            error = None if output.is_ok else MediaError(output.error_msg)
            yield Answer(ask=ask, output=output, error=error)

    def answer(self, prompt: PromptParts, n: int = 1) -> RequestOutput:
        said = prompt.text
        if said is None:
            said = next(prompt.items).source.uri
        name = said.rpartition("/")[2]
        if "stop" in name:
            raise KeyboardInterrupt
        if "bad" in name:
            return RequestOutput(
                request_id="r",
                prompt=None,
                item=prompt,
                outputs=Completions([CompletionOutput(finish_reason="error", error_code=400)]),
                finished=True,
                metrics=RequestMetrics(arrival_time=1.0),
                error_code=400,
                error_msg=f"cannot read {said}",
            )
        completion = CompletionOutput(
            token_ids=[5, 6, 7],
            text=f"\n a caption of {name}",
            reasoning_content="I look.\n",
            finish_reason="stop",
        )
        return RequestOutput(
            request_id="r",
            prompt=None,
            item=prompt,
            prompt_token_ids=[1] * 20,
            outputs=Completions(replace(completion, index=index) for index in range(n)),
            finished=True,
            metrics=RequestMetrics(
                arrival_time=1.0,
                preprocess_time=0.01,
                first_token_time=0.25,
                model_execute_time=1.23456,
            ),
            num_input_image_tokens=16,
            num_cached_tokens=4,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.is_closed = True


@pytest.fixture
def fake_llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture
def jsonl(tmp_path):
    """Returns a function that writes rows as JSON, and strings unchanged, as lines of a file."""

    def write(*rows, name="in.jsonl"):
        path = tmp_path / name
        texts = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        path.write_text("".join(text + "\n" for text in texts))
        return path

    return write


class Children:
    """Runs functions in forked processes."""

    def start(self, work) -> int:
        """Returns the process that runs `work`; it exits with 1 when `work` raises."""
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work()
                code = 0
            finally:
                os._exit(code)
        return child

    def wait(self, child: int) -> int:
        """Returns the exit code of a process, below 0 for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def __call__(self, work) -> int:
        return self.wait(self.start(work))


@pytest.fixture
def in_child() -> Children:
    return Children()
