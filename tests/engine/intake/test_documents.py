"""Documents: items of a kind that yields items of another, in prompts of every form."""

import base64

import pytest

from mmdeploy_llm.errors import (
    MediaError,
    MediaLimitError,
    MediaTimeoutError,
    RequestError,
    UnsupportedMediaError,
)
from mmdeploy_llm.hooks import MediaLimits, MediaSplitter, SplitPart
from mmdeploy_llm.values.params import SamplingParams

PARAMS = SamplingParams()
IMAGE = "<|image_pad|>"
PAGES = "<|pages|>"  # no token of the tokenizer


class Pages:
    """The pages of a "document" such as b"3 4 5": each number is a page of so many tokens."""

    def __init__(self, splitter, numbers, first=1):
        self.splitter, self.numbers, self.first = splitter, numbers, first

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        number = self.numbers[index]
        if number == "broken":
            raise MediaError("the page is damaged")
        self.splitter.made.append(index)
        return SplitPart(source=number.encode(), label=self.label(index))

    def label(self, index):
        return f"page {self.first + index}"


class PaperSplitter(MediaSplitter):
    kind = "paper"
    markers = (PAGES, "<|start|><|end|>")
    part_name = "page"
    range_option = "pages"

    def __init__(self):
        self.made, self.calls, self.closed = [], [], False

    def split(self, source, options, limits):
        self.calls.append(dict(options))
        numbers, first = source.decode().split(), 1
        if "pages" in options:
            first, last = map(int, options["pages"].split("-"))
            numbers = numbers[first - 1 : last]
        return Pages(self, numbers, first)

    def close(self):
        self.closed = True


def fetch(ref, limits):
    return b"3 4 broken" if "bad" in ref.uri else b"3 4 5"


@pytest.fixture
def splitter():
    return PaperSplitter()


@pytest.fixture
def papers(make_intake, splitter):
    """Builds an intake that takes images and papers."""

    def make(one=splitter, **changes):
        limits = {"image": 9, "paper": 2}
        return make_intake(
            splitters={"paper": one},
            yields={"paper": "image"},
            **{"limit_mm_per_prompt": limits, "fetch": fetch, **changes},
        )

    return make


def spans(intake, prompt):
    (request,) = intake.accept(prompt, PARAMS)
    return [(span.item.kind, span.item.num_tokens) for span in request.media]


def paper(text, *values, **others):
    return {"prompt": text, "multimodal_data": {"paper": list(values), **others}}


def chat(*parts):
    content = [*parts, {"type": "text", "text": "Read."}]
    return {"messages": [{"role": "user", "content": content}]}


# How prompts name them


def test_the_marker_of_a_document_stands_for_all_its_pages(papers):
    intake = papers()
    (request,) = intake.accept(paper(f"a{PAGES}b", b"3 4"), PARAMS)
    assert [(span.item.kind, span.item.num_tokens) for span in request.media] == [
        ("image", 3),
        ("image", 4),
    ]
    # Each page is written as the chat template writes an image.
    assert request.prompt == "a<|start|><|image@placeholder|><|end|>" * 1 + (
        "<|start|><|image@placeholder|><|end|>b"
    )
    assert intake.count_tokens(paper(f"a{PAGES}b", b"3 4")).num_prompt_tokens == len(
        request.prompt_token_ids
    )


def test_a_marker_for_each_page_is_accepted_too(papers):
    assert spans(papers(), paper(f"{IMAGE} and {IMAGE}", b"3 4")) == [("image", 3), ("image", 4)]


def test_without_a_template_a_page_is_the_first_marker(papers):
    (request,) = papers(chat_template=None).accept(paper(PAGES, b"3 4"), PARAMS)
    assert request.prompt == "<|image@placeholder|>" * 2


@pytest.mark.full
def test_media_take_the_places_of_the_text(papers):
    prompt = paper(f"{IMAGE}{PAGES}{IMAGE}", b"3 4", image=[b"7", b"8"])
    assert [count for _, count in spans(papers(), prompt)] == [7, 3, 4, 8]
    prompt = paper(f"{IMAGE}{PAGES}{PAGES}", b"3 4", b"5", image=[b"7"])
    assert [count for _, count in spans(papers(), prompt)] == [7, 3, 4, 5]


def test_in_token_ids(papers, tokenizer):
    ids = tokenizer.encode(f"a<|start|><|end|>b{IMAGE}")
    prompt = {"prompt_token_ids": ids, "multimodal_data": {"paper": b"3 4", "image": b"7"}}
    assert [count for _, count in spans(papers(), prompt)] == [3, 4, 7]
    ids = tokenizer.encode(f"{IMAGE}{IMAGE}")
    prompt = {"prompt_token_ids": ids, "multimodal_data": {"paper": b"3 4"}}
    assert [count for _, count in spans(papers(), prompt)] == [3, 4]


def test_in_messages(papers, tokenizer):
    intake = papers()
    prompt = chat(
        {"type": "image", "image": b"7"},
        {"type": "paper", "paper": b"3 4 5", "pages": "2-3"},
        {"type": "text", "text": f"typed {PAGES} is text"},
    )
    (request,) = intake.accept(prompt, PARAMS)
    assert [span.item.num_tokens for span in request.media] == [7, 4, 5]
    assert request.prompt.count("<|start|><|image@placeholder|><|end|>") == 3
    assert f"typed {PAGES} is text" in request.prompt
    url = f"data:paper/x;base64,{base64.b64encode(b'3').decode()}"
    assert spans(intake, chat({"type": "paper_url", "paper_url": {"url": url}}))


def test_a_part_without_its_document_takes_the_given_one(papers):
    prompt = {**chat({"type": "paper"}), "multimodal_data": {"paper": b"3 4"}}
    assert [count for _, count in spans(papers(), prompt)] == [3, 4]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("text", [f"{PAGES}{PAGES}", f"{PAGES}{IMAGE}"])
def test_wrong_numbers_of_markers(papers, text):
    with pytest.raises(MediaError, match="give one"):
        papers().accept(paper(text, b"3 4"), PARAMS)


def test_a_prompt_without_placeholders_names_the_marker(papers):
    with pytest.raises(MediaError, match=r"'<\|pages\|>' stands for all pages of a paper"):
        papers().accept(paper("nothing", b"3 4"), PARAMS)


# Options


def test_options_of_the_item_and_of_the_prompt(papers, splitter):
    intake = papers()
    prompt = paper(PAGES, {"paper": b"3 4 5", "pages": "1-2"})
    assert [count for _, count in spans(intake, prompt)] == [3, 4]
    prompt = {**paper(PAGES, b"3 4 5"), "mm_processor_kwargs": {"paper_pages": "3-3"}}
    assert [count for _, count in spans(intake, prompt)] == [5]
    assert splitter.calls == [{"pages": "1-2"}, {"pages": "3-3"}]


def test_options_that_begin_with_the_yielded_kind_go_to_the_parts(papers, splitter, processor):
    seen = []
    processor.process = lambda item, options, own=processor.process: (
        seen.append(dict(options)) or own(item, options)
    )
    prompt = paper(PAGES, {"paper": b"3", "pages": "1-1", "image_size": 5})
    papers().accept({**prompt, "mm_processor_kwargs": {"zoom": 2}}, PARAMS)
    assert splitter.calls == [{"pages": "1-1"}]
    assert seen == [{"image_size": 5, "zoom": 2}]


def test_an_image_budget_bounds_the_pages(papers):
    with pytest.raises(MediaError, match=r"page 1 of the paper: .*image_tokens"):
        papers().accept(paper(PAGES, {"paper": b"3", "image_tokens": "much"}), PARAMS)


def test_options_of_no_document_are_refused(papers):
    for prompt in ({"prompt": "a"}, chat(), {"prompt": IMAGE, "multimodal_data": {"image": b"3"}}):
        with pytest.raises(RequestError, match="sets 'paper_pages', but the prompt has no paper"):
            papers().accept({**prompt, "mm_processor_kwargs": {"paper_pages": "1-2"}}, PARAMS)


# Limits


def test_a_limit_is_told_before_a_page_is_made(papers, splitter):
    intake = papers()
    long = " ".join(["3"] * 1000).encode()
    with pytest.raises(
        MediaLimitError,
        match=r"the paper has 1000 pages, image allows 9: raise limit_mm_per_prompt="
        r"\{'image': 1000\} or give pages='1-9'",
    ):
        intake.accept(paper(PAGES, long), PARAMS)
    with pytest.raises(MediaLimitError, match=r"9 beside 2 given otherwise.*1002.*pages='1-7'"):
        intake.accept(paper(f"{PAGES}{IMAGE}{IMAGE}", long, image=[b"1", b"2"]), PARAMS)
    assert splitter.made == []
    with pytest.raises(MediaLimitError, match=r"Too many paper items in prompt, got 3 .* is 2"):
        intake.accept(paper(PAGES * 3, b"1", b"1", b"1"), PARAMS)


def test_a_file_is_named(papers):
    intake = papers(limit_mm_per_prompt={"image": 1})
    with pytest.raises(MediaLimitError, match=r"^report.x has 3 pages, image allows 1: .*='1'$"):
        intake.accept(paper(PAGES, "/some/report.x"), PARAMS)
    with pytest.raises(MediaError, match=r"^page 3 of bad.x: the page is damaged"):
        papers().accept(paper(PAGES, "/some/bad.x"), PARAMS)


@pytest.mark.full
def test_pages_are_made_one_at_a_time(papers, splitter, processor):
    processed = []
    original = processor.process

    def process(item, options):
        processed.append((item, len(splitter.made)))
        return original(item, options)

    processor.process = process
    numbers = [str(1 + index % 3) for index in range(1000)]
    intake = papers(
        limit_mm_per_prompt={"image": 1000}, max_model_len=9999, encoder_cache_tokens=9999
    )
    assert len(spans(intake, paper(PAGES, " ".join(numbers).encode()))) == 1000
    assert splitter.made == list(range(1000))
    # A page was processed before the next one was made; pages of one content are not known before.
    assert [made for _, made in processed] == list(range(1, 1001))


@pytest.mark.full
def test_the_same_document_is_made_once(papers, splitter):
    intake = papers()
    (one,) = intake.accept(paper(PAGES, b"3 4"), PARAMS)
    (other,) = intake.accept(paper(PAGES, b"3 4"), PARAMS)
    assert splitter.made == [0, 1]
    assert [span.item.key for span in one.media] == [span.item.key for span in other.media]
    assert len({span.item.key for span in one.media}) == 2
    intake.accept(paper(PAGES, {"paper": b"3 4", "pages": "1-2"}), PARAMS)
    assert splitter.made == [0, 1, 0, 1]  # its options may change what a page looks like


def test_a_part_may_be_a_path(papers, splitter):
    splitter.split = lambda source, options, limits: [SplitPart(source="/some/picture.png")]
    intake = papers(fetch=lambda ref, limits: b"6" if ref.kind == "image" else b"")
    assert spans(intake, paper(PAGES, "/some/folder")) == [("image", 6)]


def test_a_splitter_may_want_the_path(papers, splitter, tmp_path):
    splitter.wants_path = True
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "other").mkdir()
    (root / "link").symlink_to(tmp_path / "other")
    splitter.split = lambda path, options, limits: (
        [SplitPart(source=b"2")] * len(path.relative_to(tmp_path).parts)
    )
    intake = papers(limits=MediaLimits(allowed_root=root))
    assert spans(intake, paper(PAGES, str(root))) == [("image", 2)]
    assert spans(intake, paper(PAGES, root.as_uri())) == [("image", 2)]
    for path in (tmp_path / "other", root / "link", tmp_path / "none"):
        with pytest.raises(MediaError, match="is outside the folder"):
            intake.accept(paper(PAGES, str(path)), PARAMS)
    with pytest.raises(MediaError, match="does not exist"):
        intake.accept(paper(PAGES, str(root / "none")), PARAMS)


@pytest.mark.full
def test_a_document_of_documents(make_intake, splitter):
    class Binder(MediaSplitter):
        kind = "binder"
        markers = ("<|binder|>",)

        def split(self, source, options, limits):
            return [SplitPart(source=own, label=f"tab {i}") for i, own in enumerate(source)]

    intake = make_intake(
        splitters={"paper": splitter, "binder": Binder()},
        yields={"paper": "image", "binder": "paper"},
        limit_mm_per_prompt={"image": 5, "paper": 2},
    )
    binder = {"binder": ({"paper": b"3 4 5", "pages": "1-2"}, b"6")}
    prompt = {"prompt": "<|binder|>", "multimodal_data": {"binder": binder}}
    assert [count for _, count in spans(intake, prompt)] == [3, 4, 6]
    long = {"binder": {"binder": (b"1 2 3 4 5 6",)}}
    with pytest.raises(MediaLimitError, match="tab 0 of the binder has 6 pages, image allows 5"):
        intake.accept({"prompt": "<|binder|>", "multimodal_data": long}, PARAMS)


# Faults


class Lies:
    """A sequence whose length is not what it holds."""

    def __init__(self, length, parts=()):
        self.length, self.parts = length, parts

    def __len__(self):
        if isinstance(self.length, Exception):
            raise self.length
        return self.length

    def __getitem__(self, index):
        return self.parts[index]


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("found", "message"),
    [
        ((), "the paper has no pages, so there is no image in it"),
        (None, "must return a sequence of parts, got NoneType"),
        ((part for part in ()), "must return a sequence of parts, got generator"),
        ("pages", "must return a sequence of parts, got str"),
        (Lies(2, [SplitPart(source=b"3")]), r"page 2 of the paper: .*PaperSplitter.* IndexError"),
        (Lies(-1), "ValueError"),
        (Lies(2**70), "OverflowError"),
        (Lies(2**40), "has 1099511627776 pages, image allows 9"),
        (Lies(OSError("no disk")), r"PaperSplitter.* failed on the paper: OSError: no disk"),
        (Lies(SystemExit(2)), "SystemExit"),
        ([b"3"], "page 1 of the paper: .* must make SplitParts, got bytes"),
        ([SplitPart(source=None)], "page 1 of the paper: the image is None"),
        ([SplitPart(source=b"bad")], "page 1 of the paper: the image is corrupt"),
        ([SplitPart(source=b"crash")], r"page 1 of the paper: .*FakeProcessor.* KeyError"),
        ([SplitPart(source=b"3", options=[1])], "must make SplitParts"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_splitter_that_breaks_its_contract(papers, splitter, found, message):
    splitter.split = lambda source, options, limits: found
    with pytest.raises(MediaError, match=message):
        papers().accept(paper(PAGES, b""), PARAMS)


@pytest.mark.full
def test_a_splitter_that_hangs_has_a_deadline(papers, splitter):
    import threading

    event = threading.Event()
    splitter.split = lambda source, options, limits: event.wait(120)
    intake = papers(limits=MediaLimits(decode_timeout=0.05))
    with pytest.raises(MediaTimeoutError, match=r"media splitter PaperSplitter .* the paper"):
        intake.accept(paper(PAGES, b"3"), PARAMS)
    event.set()


def test_a_kind_that_is_known_and_not_taken(make_intake):
    prompt = {"prompt": "a", "multimodal_data": {"paper": b"3"}}
    with pytest.raises(UnsupportedMediaError, match="no installed plugin processes paper for this"):
        make_intake(known=("paper",)).accept(prompt, PARAMS)
    with pytest.raises(RequestError, match="unknown kind 'paper'"):
        make_intake().accept(prompt, PARAMS)


def test_splitters_are_closed_with_the_intake(papers, splitter):
    papers().close()
    assert splitter.closed
