"""The Chinese pages of the guide have what the English ones have, and stay in their language."""

import re
import unicodedata
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def hooks(load_file):
    return load_file("../docs/hooks.py")


@pytest.fixture(scope="module")
def chinese(hooks):
    return hooks.chinese


@pytest.fixture(scope="module")
def pages(hooks):
    """Returns the Chinese files, as they are in the repository."""
    found = [each for each in hooks.Site().origins if each.endswith(hooks.chinese.ENDING)]
    return {origin: (hooks.ROOT / origin).read_text() for origin in found}


ENGLISH = """# Title
Words.
## One
Use `--a` and `--b`, see [two](#two).
```bash
# not a heading
run
```
| x | 1.25 |
## Two
### Deeper
Back to [one](#one).
## Three
See [it](a.md#b) and [it](a.md).
"""
CHINESE = """# 标题
## 一
用 `--b` 和 `--a`。
```bash
# not a heading
run
```
| 甲 | 1.25 |
## 二、内容
### 更深
回到[一](#一)。
## 三
见[它](a.zh.md#乙)和[它](a.zh.md)。
"""


def slug(title):
    """Returns the anchor of a heading, as the site and GitHub make it."""
    text = re.sub(r"[^\w\s-]", "", unicodedata.normalize("NFKC", title)).strip().lower()
    return re.sub(r"[-\s]+", "-", text)


def test_the_guide_in_chinese_lacks_nothing(hooks, chinese, pages):
    assert {"README.zh.md", "docs/quickstart.zh.md", "docs/glossary.zh.md"} <= pages.keys()
    for origin, text in pages.items():
        original = (hooks.ROOT / chinese.english(origin)).read_text()
        assert chinese.differences(text, original) == [], f"{origin}; CONTRIBUTING.md says how"


def test_links_within_a_page_lead_to_its_headings(hooks, chinese, pages):
    for origin, text in pages.items():
        titles = {slug(each.title) for each in chinese.sections(text)}
        missing = {*re.findall(r"\]\(#([^)]+)\)", chinese.prose(text))} - titles
        assert missing == set(), origin


def test_links_stay_in_chinese_where_a_page_exists(hooks, chinese, pages):
    for origin, text in pages.items():
        for match in hooks.LINK.finditer(chinese.prose(text)):
            target = hooks.resolve(origin, match[2])
            is_own = target == chinese.english(origin)  # the switch of languages
            assert is_own or target is None or chinese.chinese(target) not in pages, match[0]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "## 三\n见[它](a.zh.md#乙)和[它](a.zh.md)。\n",
            "",
            'the end of the page stands where the English page has "Three"',
        ),
        (
            "(a.zh.md)。\n",
            "(a.zh.md)。\n## 四\n",
            '"四" stands where the English page has "ended"',
        ),
        ("## 三\n", "### 三\n", '"三" stands where the English page has "Three"'),
        ("run\n", "run it\n", '"一" ("One" in English): other code blocks'),
        ("| 甲 | 1.25 |\n", "1.25\n", '"一" ("One" in English): 0 rows of tables instead of 1'),
        ("a.zh.md#", "b.md#", '"三" ("Three" in English): lacks a link to a.md'),
        ("和[它](a.zh.md)", "", '"三" ("Three" in English): lacks a link to a.md'),
        ("1.25", "1.26", '"一" ("One" in English): other figures: 1.25, 1.26'),
        ("`--b` 和 ", "", '"一" ("One" in English): says nothing about `--b`'),
    ],
)
def test_what_a_chinese_page_lacks_is_named(chinese, old, new, problem):
    assert chinese.differences(CHINESE, ENGLISH) == []
    assert old in CHINESE
    (found,) = chinese.differences(CHINESE.replace(old, new), ENGLISH)
    assert found.startswith(problem)


def test_a_generated_table_is_the_english_one(chinese):
    table = "<!-- table: X -->\n| a |\n<!-- end of table -->\n"
    (found,) = chinese.differences(f"# 甲\n{table}".replace("| a", "| b"), f"# A\n{table}")
    assert found == '"甲" ("A" in English): other generated tables; run: python docs/hooks.py'


@pytest.mark.parametrize("table", ["table: X", "architectures: begin"])
def test_code_blocks_and_generated_tables_are_copied(chinese, table):
    end = "architectures: end" if "begin" in table else "end of table"
    page, original = (
        f"{text}<!-- {table} -->\n| old |\n<!-- {end} -->\n" for text in (CHINESE, ENGLISH)
    )
    new = [("run\n", "run --again\n"), ("| old |\n", "| new |\n| \\1 |\n")]
    expected = page
    for before, after in new:
        original, expected = original.replace(before, after), expected.replace(before, after)
    assert len(chinese.differences(page, original)) == 2
    assert chinese.copy_blocks(page, original) == expected
    assert chinese.differences(expected, original) == []
    with pytest.raises(ValueError, match='"一" has not the code blocks'):
        chinese.copy_blocks(CHINESE, ENGLISH.replace("```bash", "```\nmore\n```\n```bash"))
    with pytest.raises(ValueError, match='"三" has not the tables'):
        chinese.copy_blocks(CHINESE, original)
    with pytest.raises(ValueError, match="stands where"):
        chinese.copy_blocks(CHINESE, ENGLISH + "## Four\n")


def test_a_link_to_an_english_page_is_marked(hooks):
    site = hooks.Site()
    made = site.relink(
        "[a](api.md) [b](captioning.zh.md#命令) [c](../examples/tools.py)", "zh/quickstart.md"
    )
    assert made == (
        '[a](../api.md){: .english title="英文页面" } [b](captioning.md#命令) '
        "[c](../source/examples/tools.py.md)"
    )


def test_every_title_of_the_navigation_has_a_chinese_one(hooks):
    config = (hooks.ROOT / "mkdocs.yml").read_text()
    titles = re.findall(r"^ +- ([^:\n]+):", config.partition("\nnav:")[2], re.M)
    known = re.findall(
        r"^    ([^:\n]+): ", config.partition("  chinese:")[2].partition("\nex")[0], re.M
    )
    assert len(titles) > 40
    assert len(known) == len(set(known))
    assert {*titles} == {*known}


def test_a_cell_shows_no_backslash(hooks):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="plugins.md"))
    html = hooks.on_page_content(
        "<td><code>str \\| None</code></td><p>a \\| b</p>", page, None, None
    )
    assert html == "<td><code>str | None</code></td><p>a \\| b</p>"
