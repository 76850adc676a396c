"""A stand-in for LLM that answers from file names, and small image files."""

import io
from collections.abc import Iterable, Iterator

import pytest
from PIL import Image

from mmdeploy_llm.outputs import CompletionOutput, RequestMetrics, RequestOutput


class FakeLLM:
    """Answers two prompts at a time, the later one first. A name with "bad" fails; one with "stop"
    is where the user presses Ctrl-C. `num_taken` counts prompts taken from the iterable."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.prompts: list[dict] = []
        self.params = None
        self.is_closed = False

    def generate_iter(
        self, prompts: Iterable[dict], sampling_params=None
    ) -> Iterator[RequestOutput]:
        self.params = sampling_params
        batch: list[dict] = []
        for prompt in prompts:
            self.num_taken += 1
            self.prompts.append(prompt)
            batch.append(prompt)
            if len(batch) == 2:
                yield from map(self._answer, reversed(batch))
                batch = []
        yield from map(self._answer, reversed(batch))

    def _answer(self, prompt: dict) -> RequestOutput:
        path = prompt["messages"][0]["content"][0]["image"]
        if "stop" in path:
            raise KeyboardInterrupt
        metrics = RequestMetrics(
            arrival_time=1.0,
            preprocess_time=0.01,
            first_token_time=0.25,
            model_execute_time=1.23456,
        )
        if "bad" in path.rpartition("/")[2]:
            return RequestOutput(
                request_id="r",
                prompt=prompt,
                outputs=CompletionOutput(finish_reason="error"),
                finished=True,
                metrics=RequestMetrics(arrival_time=1.0),
                error_code=400,
                error_msg=f"cannot read {path}",
            )
        return RequestOutput(
            request_id="r",
            prompt=prompt,
            prompt_token_ids=(1,) * 20,
            outputs=CompletionOutput(
                token_ids=(5, 6, 7),
                text=f"\n a caption of {path.rpartition('/')[2]}",
                reasoning_content="I look.\n",
                finish_reason="stop",
            ),
            finished=True,
            metrics=metrics,
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
def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 20), (200, 30, 30)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def pictures(tmp_path, png):
    """A folder with 1.png, 2.png, 10.png, bad.jpg (corrupt), a text file and a subfolder."""
    folder = tmp_path / "pictures"
    (folder / "sub").mkdir(parents=True)
    for name in ("1.png", "2.png", "10.png", "sub/3.PNG", ".hidden.png"):
        (folder / name).write_bytes(png)
    (folder / "bad.jpg").write_bytes(b"\xff\xd8\xff not a picture")
    (folder / "notes.txt").write_text("no picture")
    return folder
