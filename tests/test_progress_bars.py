"""Progress bars: tqdm's own for the place, or what a caller makes."""

import functools
import logging
from dataclasses import replace

import pytest
from tqdm import auto, tqdm

from mmdeploy_llm.client.answering import Progress
from mmdeploy_llm.values.outputs.request_output import (
    CompletionOutput,
    Completions,
    RequestMetrics,
    RequestOutput,
)
from mmdeploy_llm.values.text.progress_bars import in_notebook, open_bar, where_seen

OUTPUT = RequestOutput(
    request_id="r",
    prompt="p",
    item="p",
    outputs=Completions([CompletionOutput(token_ids=(1, 2))]),
    metrics=RequestMetrics(arrival_time=0.0),
    prompt_token_ids=[1],
    finished=True,
)


class Bar:
    """The least that a caller's bar has."""

    def __init__(self, total, desc):
        self.total, self.desc, self.num, self.is_closed = total, desc, 0, False

    def update(self, num):
        self.num += num

    def close(self):
        self.is_closed = True


def test_a_bar_of_the_callers_own_is_made_as_tqdm_is_and_counts():
    made = []

    def make(**options):
        made.append(Bar(**options))
        return made[-1]

    with Progress(2, make) as progress:
        progress.count(OUTPUT)
    (bar,) = made
    assert (bar.total, bar.desc, bar.num, bar.is_closed) == (2, "Processed prompts", 1, True)


@pytest.mark.parametrize("make", [tqdm, functools.partial(tqdm, ncols=80), auto.tqdm])
def test_tqdm_and_its_partials_make_bars(make, capsys):
    with Progress(1, make) as progress:
        progress.count(OUTPUT)
    assert "1/1" in capsys.readouterr().err


def test_what_makes_no_bar_is_named():
    with pytest.raises(TypeError, match="the list that it returned has no method update and no cl"):
        open_bar(lambda **_: [], total=1)


@pytest.mark.parametrize(("use_tqdm", "is_seen"), [(True, True), (False, False), (None, False)])
def test_a_bar_is_shown_where_it_is_wanted(use_tqdm, is_seen, capsys):
    open_bar(use_tqdm, total=1, desc="Bar").close()
    assert ("Bar" in capsys.readouterr().err) == is_seen


def test_in_a_notebook_an_unasked_bar_is_shown_too(capsys, monkeypatch):
    monkeypatch.setattr(auto, "notebook_tqdm", object())
    assert in_notebook()
    open_bar(None, total=1, desc="Bar").close()
    assert "Bar" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "found"), [(True, None), (1, None), (False, False), (0, False)])
def test_a_batch_shows_its_bar_where_somebody_sees_it(given, found):
    assert where_seen(given) is found
    assert where_seen(tqdm) is tqdm


@pytest.mark.parametrize("use_tqdm", [True, False])
def test_prompts_that_failed_are_told_after_the_bar(use_tqdm, caplog):
    failed = replace(OUTPUT, error_code=413, error_msg="too many images")
    with (
        caplog.at_level(logging.WARNING, logger="mmdeploy_llm"),
        Progress(3, use_tqdm) as progress,
    ):
        for output in (OUTPUT, failed, replace(failed, error_msg="another")):
            progress.count(output)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == use_tqdm
    if use_tqdm:
        assert told[0].startswith("2 of 3 prompts failed (their outputs have is_ok False")
        assert told[0].endswith("the first with error 413: too many images")
