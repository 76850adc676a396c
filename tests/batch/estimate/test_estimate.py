"""What a batch will take: drawn, counted, measured and told in words."""

import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image, ImageDraw
from typer.testing import CliRunner

from mmdeploy_llm import LLM, SamplingParams, cli
from mmdeploy_llm.batch.estimate import estimate
from mmdeploy_llm.batch.estimate.census import Kind, Tokens
from mmdeploy_llm.batch.estimate.draw import draw
from mmdeploy_llm.batch.estimate.faster import Faster, _times, fewer_answer_tokens
from mmdeploy_llm.batch.estimate.result import Estimate, Range, outliers, sized
from mmdeploy_llm.batch.estimate.steps import Machine, StepCosts, Work, share_filled
from mmdeploy_llm.batch.sources import open_files, open_source
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.records.record import ItemError, Record, Timings
from mmdeploy_llm.engine.engine import Engine
from mmdeploy_llm.errors import ConfigError

COLORS = ("red", "green", "blue", "yellow", "black")
SIZES = (96, 160, 320, 640, 1280, 2560)


def draw_pictures(folder, num, seed=0):
    """Writes drawings of mixed sizes, small ones first."""
    rng = random.Random(seed)
    for number, size in enumerate(sorted(rng.choices(SIZES, (8, 8, 6, 4, 2, 1), k=num))):
        image = Image.new("RGB", (size, int(size * rng.uniform(0.6, 1))), "white")
        pen = ImageDraw.Draw(image)
        for _ in range(rng.randrange(1, 3)):
            x, y, r = (rng.uniform(0.2, 0.7) * size, rng.uniform(0.2, 0.4) * size, size / 6)
            shape = rng.choice((pen.ellipse, pen.rectangle))
            shape((x - r, y - r, x + r, y + r), fill=rng.choice(COLORS))
        image.save(folder / f"{number:05d}.{rng.choice(('png', 'jpg'))}")


class TestDraw:
    def lines(self, num, seed=0, num_lines=1000, **options):
        rows = [{"id": f"r{n}", "prompt": "x"} for n in range(1, num_lines + 1)]
        selection = Selection(**options)
        drawn = draw(open_source(rows, SamplingParams(), selection), selection, num, seed)
        return drawn.total, [item.line for item in drawn.items]

    def test_the_same_seed_draws_the_same_items(self):
        total, lines = self.lines(20)
        assert (total, len(set(lines))) == (1000, 20)
        assert self.lines(20) == (total, lines) != self.lines(20, seed=1)

    def test_only_selected_items_are_drawn(self):
        total, lines = self.lines(10, shard=2, num_shards=3, limit=60)
        assert total == 20
        assert all(line <= 60 and line % 3 == 2 for line in lines)

    def test_of_few_items_all_are_drawn(self):
        assert self.lines(20, num_lines=3) == (3, [1, 2, 3])

    @pytest.mark.full
    def test_a_stream_of_unknown_length_is_read_once_and_each_item_is_as_likely(self):
        counts = [0] * 50
        for seed in range(400):
            rows = iter([{"prompt": str(n)} for n in range(50)])
            source = open_source(rows, SamplingParams(), Selection())
            drawn = draw(source, Selection(), 10, seed)
            assert (drawn.total, len(drawn.items)) == (50, 10)
            for item in drawn.items:
                counts[item.line - 1] += 1
        assert min(counts) > 45 < 80 < max(counts) < 120

    def test_files_of_all_sizes_are_drawn(self, tmp_path):
        for number in range(200):
            (tmp_path / f"{number}.png").write_bytes(bytes(number * 10))
        source = open_files([str(tmp_path)], SamplingParams(), Selection())
        for seed in range(5):
            drawn = draw(source, Selection(), 10, seed)
            sizes = sorted(item.size for item in drawn.items)
            assert [size // 200 for size in sizes] == list(range(10))

    def test_others_are_drawn_for_the_time_and_none_twice(self, tmp_path):
        for number in range(300):
            (tmp_path / f"{number}.png").write_bytes(bytes(number * 10))
        files = open_files([str(tmp_path)], SamplingParams(), Selection())
        rows = open_source([{"prompt": "x"}] * 100, SamplingParams(), Selection())
        for source in (files, rows):
            drawn = draw(source, Selection(), 10, 0)
            lines = [item.line for item in (*drawn.items, *drawn.more)]
            assert len(lines) == len(set(lines)) >= 70
            assert lines[10:] != sorted(lines[10:])

    @pytest.mark.parametrize("rows", [[], iter([])])
    def test_nothing_to_draw(self, rows):
        source = open_source(rows, SamplingParams(), Selection())
        with pytest.raises(ConfigError, match="no items"):
            draw(source, Selection(), 5, 0)
        with pytest.raises(ConfigError, match="at least 1"):
            draw(source, Selection(), 0, 0)


def step(sampled, scheduled, encoded=0, seconds=0.0):
    return SimpleNamespace(
        num_sampled_tokens=sampled,
        num_scheduled_tokens=scheduled,
        num_encoded_media=encoded,
        plan_time=0.0,
        run_time=seconds,
        deliver_time=0.0,
    )


def work(**values):
    given = {"prompt_tokens": 0, "output_tokens": 0, "num_media": 0, "longest": 0, "preprocess": 0}
    return Work(**{"num_items": 1000, **given, **values})


class TestSteps:
    COSTS = StepCosts(fixed=0.01, token=0.001, prefill=0.0002, media=0.05)
    ALONE = Machine(max_seqs=32, num_threads=1)

    def test_costs_are_found_in_steps(self):
        rng, steps = random.Random(0), []
        for _ in range(200):
            sampled, prefill, media = rng.randrange(1, 20), rng.randrange(300), rng.randrange(2)
            seconds = 0.01 + 0.001 * sampled + 0.0002 * prefill + 0.05 * media
            steps.append(step(sampled, sampled + prefill, media, seconds * rng.uniform(0.9, 1.1)))
        found = StepCosts.of(steps)
        for name in ("fixed", "token", "prefill", "media"):
            assert getattr(found, name) == pytest.approx(getattr(self.COSTS, name), rel=0.25)

    def test_no_cost_is_negative(self):
        found = StepCosts.of([step(n, n, seconds=1 / n) for n in range(1, 20)])
        assert min(found.fixed, found.token, found.prefill, found.media) >= 0
        assert StepCosts.of([]) is None

    def test_a_long_answer_alone_does_not_count_as_if_all_were_alone(self):
        """20 items, one of them of 1,000 tokens: the end of the sample is slow, the run is not."""
        seconds = self.COSTS.seconds(work(output_tokens=50_000, longest=1000), self.ALONE)
        assert seconds == pytest.approx(0.01 * (50_000 / 32 + 500) + 50, rel=0.01)

    def test_places_that_are_empty_between_two_sequences_make_more_steps(self):
        """Those of the begin and the end of the sample are no such places."""
        used = [1, 4, 16, 12, 8, 12, 16, 3, 1]
        filled = share_filled([SimpleNamespace(num_scheduled_requests=own) for own in used])
        assert filled == pytest.approx(64 / 80)
        assert share_filled([]) == 1.0
        machine = replace(self.ALONE, filled=filled)
        seconds = self.COSTS.seconds(work(output_tokens=50_000), machine)
        assert seconds == pytest.approx(0.01 * 50_000 / (32 * 0.8) + 50)

    def test_preparing_media_counts_where_it_takes_longer(self):
        both = work(output_tokens=32_000, preprocess=500)
        assert self.COSTS.seconds(both, self.ALONE) == 500
        fast = Machine(max_seqs=32, num_threads=100)
        assert self.COSTS.seconds(both, fast) == pytest.approx(10 + 32)


def record(name, num_output=10, **values):
    return Record(
        **{
            "id": name,
            "path": name,
            "text": "a cat",
            "num_prompt_tokens": 100,
            "num_image_tokens": 80,
            "num_output_tokens": num_output,
            "timings": Timings(preprocess=0.01),
            **values,
        }
    )


class TestWords:
    def test_outliers_are_named(self):
        fault = ItemError(code=415, kind="RequestError", message="not an image")
        bad = record("d/bad.png", error=fault)
        given = [
            record("d/a.png", 70),
            record("d/b.png", num_prompt_tokens=900),
            record("d/c.png", text="", outcome="empty"),
            bad,
            *(record(f"d/{n}.png", outcome="truncated") for n in range(5)),
        ]
        assert list(outliers(given)) == [
            "longest prompt: b.png (900 tokens)",
            "longest answer: a.png (70 tokens)",
            "1 of 9 failed: bad.png: not an image",
            "1 of 9 empty: c.png",
            "5 of 9 truncated: 0.png, 1.png, 2.png and 2 more",
        ]
        assert next(outliers([bad])).startswith("1 of 1 failed")
        other = replace(fault, code=413, message="too many pages")
        given = [bad, record("d/long.pdf", error=other), record("d/b.png", error=fault)]
        assert list(outliers(given)) == [
            "3 of 3 failed: bad.png, b.png: not an image; long.pdf: too many pages"
        ]

    @pytest.mark.parametrize(
        ("num", "text"), [(12, "12 bytes"), (3400, "3.4 kB"), (2.5e7, "25 MB"), (9.9e12, "9.9 TB")]
    )
    def test_sizes(self, num, text):
        assert sized(num) == text

    def test_all_of_it(self):
        found = Estimate(
            total=1500,
            kinds=(
                Kind(
                    kind="image",
                    num=1500,
                    num_bytes=10**9,
                    median=10**6,
                    largest=10**7,
                    name="d/x.png",
                ),
            ),
            tokens=Tokens(
                num_counted=220,
                median=300,
                most_of=1024,
                largest=4000,
                name="d/y.png",
                prompt=320,
                media=300,
            ),
            records=(record("d/a.png"),),
            seconds=Range(low=3000, middle=4000, high=6000),
            seconds_spent=60,
            memory_bytes=2 * 10**9,
            output_bytes=750_000,
            faster=(
                Faster(option="--image-tokens 256", times=3.14, is_measured=True),
                Faster(option="--max-tokens 90", times=1.2, effect="cuts off 10% of answers"),
            ),
            unit="image",
        )
        text = str(found)
        for words in (
            "input: 1500 images of 1.0 GB together, half of them above 1.0 MB, the "
            "largest 10 MB (d/x.png)",
            "median 300, 95 % have at most 1024, largest 4000 (d/y.png)",
            "time per image: 2.7 s (2.0 s to 4.0 s)",
            "time for all 1500: 1 h 06 min (50 min 00 s to 1 h 40 min)",
            "memory: 2.0 GB",
            "output: about 750 kB",
            "--image-tokens 256: 3.1 times (measured)",
            "--max-tokens 90: 1.2 times (cuts off 10% of answers, computed)",
            "look at: longest prompt",
        ):
            assert words in text


def test_a_limit_that_cuts_off_few_answers_is_named_with_what_it_saves():
    costs = StepCosts(fixed=0.0, token=0.001, prefill=0.0, media=0.0)
    total = SimpleNamespace(
        costs=costs,
        machine=Machine(max_seqs=8, num_threads=1),
        work=lambda records: work(output_tokens=sum(r.num_output_tokens for r in records)),
    )
    records = [record(str(n), 20) for n in range(19)] + [record("long", 620)]
    (way,) = fewer_answer_tokens(records, total)
    assert (way.option, way.effect) == ("--max-tokens 20", "cuts off 5% of answers")
    assert way.times == pytest.approx(1000 / 400)
    assert fewer_answer_tokens(records[:19], total) == []


@pytest.fixture(scope="module")
def llm():
    with LLM("shapes-vl", quiet=True) as opened:
        yield opened


PARAMS = SamplingParams(temperature=0, max_tokens=64)


@pytest.mark.full
def test_a_few_items_of_a_folder(llm, tmp_path):
    """40 pictures, of which 12 are answered."""
    draw_pictures(tmp_path, 40)
    found = llm.estimate_batch(tmp_path, num_items=12, sampling_params=PARAMS)
    assert (found.total, len(found.records), found.unit) == (40, 12, "image")
    (kind,) = found.kinds
    assert (kind.kind, kind.num) == ("image", 40)
    assert kind.largest == max(path.stat().st_size for path in tmp_path.iterdir())
    assert found.tokens.num_counted == 40
    assert found.seconds.low < found.seconds.middle < found.seconds.high
    assert 0.1 < found.seconds.middle < 60
    assert found.memory_bytes > 10**8
    assert 40 * 200 < found.output_bytes < 40 * 2000
    assert found.are_steps_known
    again = llm.estimate_batch(str(tmp_path), num_items=12, sampling_params=PARAMS)
    assert [own.path for own in again.records] == [own.path for own in found.records]


@pytest.mark.full
def test_the_program_shows_answers_and_what_all_will_take(tmp_path, monkeypatch):
    """Nothing is written but a small report."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    draw_pictures(tmp_path / "photos", 10)
    for words in (["caption", "photos"], ["batch", "photos", "-o", "captions.jsonl"]):
        done = CliRunner().invoke(cli.app, [*words, "--estimate", "4", "--max-tokens", "16"])
        assert done.exit_code == 0, done.output
        for text in ("caption", "input:", "10 images", "time per image:", "look at:"):
            assert text in done.stdout
        is_report = words[0] == "caption"
        assert ("captions.estimate.html" in done.stdout) == is_report
        found = sorted(path.name for path in tmp_path.iterdir())
        assert found == ["captions.estimate.html"] * is_report + ["photos"]
        if is_report:
            page = (tmp_path / "captions.estimate.html").read_text()
            assert page.count("<article") == 4
            assert "time for all 10" in page
            (tmp_path / "captions.estimate.html").unlink()


@pytest.mark.full
def test_with_resume_what_is_left_is_estimated_and_what_is_not_read_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    draw_pictures(tmp_path / "photos", 6)
    (tmp_path / "photos" / "a.svg").write_text("<svg/>")
    rows = "".join(f'{{"prompt": "{number}"}}\n' for number in range(6))
    (tmp_path / "rows.jsonl").write_text(rows)
    short = ["--max-tokens", "16", "-o", "out.jsonl"]
    for words in (["caption", "photos", "--no-report", *short], ["batch", "rows.jsonl", *short]):
        CliRunner().invoke(cli.app, [*words, "--limit", "2", "--overwrite"])
        before = (tmp_path / "out.jsonl").read_bytes()
        done = CliRunner().invoke(cli.app, [*words, "--estimate", "2", "--resume"])
        assert "time for all 4 left: " in done.stdout, done.output
        assert ("not read: 1 file: 1 .svg" in done.stdout) == (words[0] == "caption")
        assert (tmp_path / "out.jsonl").read_bytes() == before
        assert "time for all 6: " in CliRunner().invoke(cli.app, [*words, "--estimate", "2"]).stdout
    CliRunner().invoke(cli.app, [*words, "--resume"])
    done = CliRunner().invoke(cli.app, [*words, "--estimate", "2", "--resume"])
    assert "nothing left to do: all 6 items" in done.stdout, done.output


def test_a_cluster_cannot_be_estimated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    words = ["batch", "in.jsonl", "-o", "out.jsonl", "--estimate", "2", "--ray", "local"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code != 0
    assert "leave out --ray" in f"{done.stderr}{done.exception}"


@pytest.mark.full
def test_rows_without_files_and_bad_ones(llm):
    rows = [{"id": f"r{n}", "prompt": "What?"} for n in range(30)] + [{"what": 1}] * 10
    found = llm.estimate_batch(rows, num_items=20, seed=3, sampling_params=PARAMS)
    kinds = {kind.kind: kind.num for kind in found.kinds}
    assert set(kinds) == {"text", "unusable row"}
    assert sum(kinds.values()) == found.total == 40
    assert found.tokens is None
    assert "failed" in str(found)
    streamed = llm.estimate_batch(iter(rows), num_items=5, sampling_params=PARAMS)
    assert (streamed.total, len(streamed.records)) == (40, 5)


def test_images_that_stand_outside_of_prompts_cost_less_with_fewer_tokens():
    """Pix2Struct's prompts are as long as before."""
    total = SimpleNamespace(
        costs=StepCosts(fixed=0.0, token=0.0, prefill=0.0, media=1.0),
        machine=Machine(max_seqs=8, num_threads=1),
        work=lambda records: work(num_media=8),
    )
    before, after = (
        record("a", num_image_tokens=num, num_tokens_by_kind={"image": num, "text": 9})
        for num in (2048, 512)
    )
    assert _times([before], [after], [before], total) == pytest.approx(4)


@pytest.mark.full
def test_fewer_image_tokens_are_tried(llm, tmp_path, monkeypatch):
    monkeypatch.setattr("mmdeploy_llm.batch.estimate.faster.IMAGE_TOKENS", (16,))
    monkeypatch.setattr("mmdeploy_llm.batch.estimate.faster.WORTH", 0.5)
    draw_pictures(tmp_path, 8)
    found = llm.estimate_batch(tmp_path, num_items=8, sampling_params=PARAMS)
    (way,) = (way for way in found.faster if "image-tokens" in way.option)
    assert (way.option, way.is_measured) == ("--image-tokens 16", True)
    assert 0.9 < way.times < 4


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_work_of_1500_files_is_right_within_a_quarter(llm, tmp_path, seed, monkeypatch):
    """A sample tells how many tokens and pictures all files have. Each token and each picture
    counts as some time, whatever step it is in, so the answer is the same on every machine.

    It does not cover real seconds: what a step costs besides and how many sequences share one,
    which follows from how fast pictures come, nor what is outside of steps: the intake of pictures,
    the preparation, the writing of answers.
    """
    now, real, machine = [0.0], Engine._compute, estimate._machine

    def without_intake(*given):  # which takes real seconds
        return replace(machine(*given), num_threads=2**30)

    monkeypatch.setattr(estimate, "_machine", without_intake)
    clock = SimpleNamespace(perf_counter=lambda: now[0], time=time.time, monotonic=time.monotonic)

    def compute(engine, plan):
        now[0] += 2e-4 * plan.num_tokens + 0.006 * len(plan.encode)
        return real(engine, plan)

    monkeypatch.setattr(Engine, "_compute", compute)
    for module in ("engine.engine", "batch.estimate.estimate"):  # those that measure
        monkeypatch.setattr(f"mmdeploy_llm.{module}.time", clock)
    draw_pictures(tmp_path, 1500, seed)
    output = Path(tmp_path, "out.jsonl")
    found = [
        llm.estimate_batch(tmp_path, num_items=40, seed=number, sampling_params=PARAMS)
        for number in (1, 2, 3)
    ]
    begin = now[0]
    llm.run_batch(tmp_path, output, sampling_params=PARAMS, use_tqdm=False)
    truth = now[0] - begin
    for each in found:
        assert truth / 1.25 < each.seconds.middle < truth * 1.25, (each.seconds, truth)
