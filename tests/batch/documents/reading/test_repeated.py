"""Running headers and footers are marked from their second page on, and nothing is lost."""

from mmdeploy_llm.batch.documents.reading.repeated import mark_running


def page(number, body="Words of page", header="ACME Report", footer="Page {} of 4"):
    return f"{header}\n\n{body} {number}.\n\nMore words {number * 7}.\n\n{footer.format(number)}"


def test_lines_that_all_pages_have_become_comments_but_the_first():
    found = mark_running([page(number) for number in range(1, 5)])
    assert found.num_marked == 6
    assert found.pages[0] == page(1)
    assert found.pages[2] == page(
        3, header="<!-- page header: ACME Report -->", footer="<!-- page footer: Page {} of 4 -->"
    )


def test_two_pages_are_too_few():
    pages = [page(1), page(2)]
    assert mark_running(pages).pages == tuple(pages)


def test_a_line_of_few_pages_stays():
    pages = [page(n, header=f"Chapter {'abcdefgh'[n]}", footer="") for n in range(8)]
    pages[1:4] = [page(n, header="Part", footer="") for n in range(1, 4)]
    assert mark_running(pages).num_marked == 0


def test_tables_pictures_code_and_long_lines_stay():
    for line in ("| a | b |", "<table>", "```", "$$", "![a](b.png)", "---", "x" * 121):
        pages = [f"{line}\n\nWords {n}.\n\nMore {n}.\n\nEnd {'abc'[n]}" for n in range(3)]
        assert mark_running(pages).num_marked == 0, line


def test_pages_of_one_line_or_none_stay():
    assert mark_running(["same", "same", "same", ""]).num_marked == 0


def test_numbers_that_do_not_count_pages_are_text():
    pages = [f"a{n * n} b\n\nx{'xyzt'[n]}\n\nTotal: {n * 7}" for n in range(4)]
    assert mark_running(pages).num_marked == 0
    found = mark_running([f"p. {n}\n\nx{'xyz'[n - 7]}\n\nend {'abc'[n - 7]}" for n in (7, 8, 9)])
    assert found.pages[2].startswith("<!-- page header: p. 9 -->")


def test_the_middle_of_a_page_stays():
    pages = [f"{n} a\n\nb{n}\n\nsame\n\nc{n}\n\nd{n}" for n in "xyz"]
    assert mark_running(pages).num_marked == 0
