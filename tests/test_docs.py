"""The guide matches the code: nothing is missing or outdated, and no link leads nowhere.

tests/system/test_documents.py runs its code blocks."""

import re
import tomllib
from dataclasses import MISSING, fields

import pytest

from mmdeploy_llm import EngineConfig, errors
from mmdeploy_llm.cli.options.suggested import (
    GB,
    LACKS,
    NUM_TOKENS,
    PROGRAM,
    WEIGHT,
    suggestions,
)
from mmdeploy_llm.data.records.record import FIELDS
from mmdeploy_llm.layers import DecoderConfig
from tests.test_architecture import LAYERS

MAP = "mmdeploy_llm/README.md"
MAX_README_LINES = 140
MAX_PAGE_LINES = 250  # outside of generated tables
MAX_CELL_WORDS = 40


@pytest.fixture(scope="module")
def hooks(load_file):
    return load_file("../docs/hooks.py")


@pytest.fixture(scope="module")
def site(hooks):
    return hooks.Site()


def test_the_front_page_is_short(hooks):
    assert len((hooks.ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_the_memory_of_suggested_models_is_told_as_commands_tell_it(hooks):
    """A row of the page is computed, and README names the same GB."""
    page = (hooks.ROOT / "docs/which_model.md").read_text()
    readmes = [(hooks.ROOT / name).read_text() for name in ("README.md", "README.zh.md")]
    models = [own for purpose in LACKS for own in suggestions(purpose)]
    for own in models:
        cache = own.kv_bytes * NUM_TOKENS / GB
        sizes = [own.billions * size + cache + PROGRAM for size in (WEIGHT, 1.1, 0.6)]
        cells = [f"{each:.1f}" for each in (own.billions * WEIGHT, cache, *sizes)]
        row = f"| `{own.name}` | {own.billions:g} B | {' | '.join(cells)} |"
        assert row in page
        assert round(sizes[0]) == own.gigabytes
    for text in readmes:
        rows = re.findall(r"^\| [^|]+ \| (\d+) GB \| `([\w/.-]+)` \|", text, re.MULTILINE)
        assert len(rows) == 5
        known = {own.name: own.gigabytes for own in models}
        assert {name: int(size) for size, name in rows}.items() <= known.items()


def test_no_page_is_longer_than_a_reader_scrolls(hooks, site):
    for origin in site.origins:
        if origin.startswith(("docs/", "plugins/")) and origin.endswith(".md"):
            text = hooks.chinese.GENERATED.sub("", (hooks.ROOT / origin).read_text())
            assert len(text.splitlines()) <= MAX_PAGE_LINES, f"{origin}: split it"


def test_the_chart_of_speed_is_that_of_the_results(hooks):
    chart = hooks.speed_chart
    results = chart.RESULTS.read_text(encoding="utf-8")
    drawn = chart.chart(chart.read_ratios(results))
    assert chart.CHART.read_text(encoding="utf-8") == drawn, "run: python docs/hooks.py"
    row = "| 16 images | 8 bits | 0.385 images/s | 2.22 |  |  | 2026-11-25 |"
    assert row in results
    other = chart.chart(chart.read_ratios(results.replace(row, row.replace("2.22", "4.87"))))
    assert ">2.22<" in drawn
    assert ">4.87<" not in drawn
    assert ">4.87<" in other
    ratios = [float(found) for found in re.findall(r">(\d\.\d\d)<", drawn)]
    assert len(ratios) == 21
    page = (hooks.ROOT / "README.md").read_text()
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times as fast" in page


@pytest.mark.parametrize("page", ["docs/install.md", "docs/install.zh.md"])
def test_every_extra_of_users_is_explained(hooks, page):
    text = (hooks.ROOT / page).read_text()
    cells = re.findall(r"^\| (`.*?) \| ", text.partition("|---|---|")[2], re.MULTILINE)
    named = re.findall(r"`(\w+)`", " ".join(cells))
    extras = tomllib.loads((hooks.ROOT / "pyproject.toml").read_text())["project"]
    wanted = {*extras["optional-dependencies"]} - {"docs", "release", "dev", "corpora"}
    assert sorted(named) == sorted(wanted)
    assert "`corpora`" in text


def test_every_option_is_in_exactly_one_table(hooks):
    named = [name for group in hooks.option_tables.themes().values() for name in group]
    assert sorted(named) == sorted(EngineConfig.model_fields)
    titles = re.findall(r"<!-- table: (.+) -->", (hooks.ROOT / "docs/options.md").read_text())
    assert titles == [*hooks.option_tables.themes(), *hooks.option_tables.PARAMS]


def test_tables_of_options_are_up_to_date(hooks):
    for page in hooks.option_tables.PAGES:
        text = (hooks.ROOT / "docs" / page).read_text()
        assert hooks.option_tables.fill(text) == text, "run: python docs/hooks.py"


def test_both_pages_about_a_line_have_all_fields_of_a_record_in_their_order(hooks):
    for page in ("captioning.md", "captioning.zh.md"):
        text = (hooks.ROOT / "docs" / page).read_text(encoding="utf-8")
        assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == [*FIELDS]


def test_a_row_has_default_range_and_meaning(hooks):
    rows = hooks.option_tables.table("SamplingParams").splitlines()
    (top_p,) = [row for row in rows if row.startswith("| `top_p`")]
    assert "| `None` | float, from 0 to 1 | samples from the smallest set" in top_p
    rows = hooks.option_tables.table("Media").splitlines()
    assert any(row.startswith("| `max_media_bytes` | 256 MiB | int, from 1 |") for row in rows)
    rows = hooks.option_tables.table("GuidedDecodingParams").splitlines()
    assert any(row.startswith("| `json` | `None` | dict or text |") for row in rows)


def test_links_lead_to_pages_of_the_site(hooks, site):
    for origin, uri in site.origins.items():
        if not uri.endswith(".md"):
            continue
        page = site.relink(hooks.read(origin), uri)
        for part in hooks.FENCE.split(page)[::2]:
            for match in hooks.LINK.finditer(part):
                if "://" not in match[2]:
                    target = hooks.posixpath.join(hooks.posixpath.dirname(uri), match[2])
                    assert hooks.posixpath.normpath(target) in site.origins.values(), origin


def test_every_anchor_is_a_heading(hooks, site):
    own = [origin for origin in site.origins if origin.endswith(".md")]
    links = [
        (origin, match[1], match[2])
        for origin in (*own, "README.md", "README.zh.md")
        for part in hooks.FENCE.split((hooks.ROOT / origin).read_text())[::2]
        for match in re.finditer(r"\]\(([^)\s#:]*)#([^)\s]+)\)", part)
    ]
    assert len(links) > 200
    for origin, name, anchor in links:
        target = hooks.resolve(origin, name) if name else origin
        if target.endswith(".md"):
            assert anchor in anchors(hooks, target), f"{origin}: {name}#{anchor}"


def anchors(hooks, name):
    """Returns the anchors of a page: its headings, as GitHub and the site write them."""
    page = "".join(hooks.FENCE.split((hooks.ROOT / name).read_text())[::2])
    titles = re.findall(r"^#+ (.*)", page, re.MULTILINE)
    words = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    found = {re.sub(r"[^\w\- ]", "", title.strip()).replace(" ", "-") for title in words}
    others = re.findall(r'^::: ([\w.]+)|<a id="([^"]+)"', page, re.MULTILINE)
    return found | {own or anchor for own, anchor in others}


def test_a_link_that_leads_nowhere_ends_the_build(hooks):
    assert hooks.resolve("docs/media.md", "../SECURITY.md") == "SECURITY.md"
    assert hooks.resolve("docs/media.md", "../examples") == "examples/README.md"
    assert hooks.resolve("docs/media.md", "https://example.com/x.md") is None
    with pytest.raises(FileNotFoundError, match=r"docs/media.md links to gone.md"):
        hooks.resolve("docs/media.md", "gone.md")


def test_tutorials_changelog_and_figures_are_pages_where_they_are(site):
    for origin in (
        "plugins/mmdeploy_llm_plugins/README.md",
        "processors/mmdeploy_llm_processors/README.md",
        "CHANGELOG.md",
    ):
        assert origin in site.origins
    page = site.relink("[figures](../../examples/benchmarks/RESULTS.md#cuda)", "plugins.md")
    assert page == "[figures](benchmarks.md#cuda)"


def test_a_notebook_becomes_a_page(hooks):
    page = hooks.read("docs/caption_demo_images.ipynb")
    assert page.startswith("# Caption the demo images")
    assert "```python\nfrom pathlib import Path" in page
    assert "```{.text .printed}\nreasoning: I see" in page


def test_the_tree_of_errors_is_that_of_the_code(hooks):
    text = (hooks.ROOT / "docs/errors.md").read_text()
    tree = re.search(r"```text\n(MMDeployLLMError.*?)```", text, re.DOTALL)[1]
    parents = {}  # of each indentation
    found = set()
    for line in tree.splitlines():
        indent, name, code = re.fullmatch(r"([ |+]*)(\w+)\S* +.*?(\d{3})?", line).groups()
        kind = getattr(errors, name)
        above = [parents[size] for size in sorted(parents) if size < len(indent)]
        assert not above or above[-1] in kind.__bases__, name
        assert code is None or kind.code == int(code), name
        parents = {size: kind for size, kind in parents.items() if size < len(indent)}
        parents[len(indent)] = kind
        found.add(kind)
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    assert found == kinds


def test_the_cells_of_all_tables_are_short(hooks, site):
    """A cell is read at a glance; what needs more words has a paragraph."""
    for origin, uri in site.origins.items():
        if uri.endswith(".md"):
            text = "".join(hooks.FENCE.split(hooks.read(origin))[::2])
            for row in re.findall(r"^\|.*$", hooks.option_tables.fill(text), re.MULTILINE):
                for cell in re.split(r"(?<!\\)\|", row):
                    assert len(cell.split()) <= MAX_CELL_WORDS, f"{origin}: {cell}"


def test_the_changelog_has_one_short_line_for_each_capability(hooks):
    lines = (hooks.ROOT / "CHANGELOG.md").read_text().partition("## [Unreleased]")[2].splitlines()
    for line in lines:
        if line.startswith("- "):
            assert "](" in line, f"no link to the guide: {line}"
            assert len(line.split()) <= MAX_CELL_WORDS, line


def test_the_glossary_is_sorted(hooks):
    text = (hooks.ROOT / "docs/glossary.md").read_text()
    words = re.findall(r"^\| ([^|]+) \|", text.replace("| word |", ""), re.MULTILINE)
    assert len(words) > 40
    assert words == sorted(words, key=str.lower)


def test_the_engine_calls_three_rooms_as_the_map_says(hooks):
    text = (hooks.ROOT / "mmdeploy_llm/engine/engine.py").read_text()
    rooms = set(re.findall(r"^from \.(intake|schedule|runner|delivery)\b", text, re.MULTILINE))
    (row,) = re.findall(r"^\| `engine/engine.py` \|(.*)$", hooks.read(MAP), re.MULTILINE)
    assert rooms == set(re.findall(r"`engine/(\w+)/`", row))


def folders(path):
    return [each for each in sorted(path.iterdir()) if (each / "__init__.py").exists()]


def test_the_map_names_every_package_from_the_ground_up(hooks):
    listed = re.findall(r"^- `(\w+)/` ", hooks.read(MAP), re.MULTILINE)
    assert tuple(listed) == LAYERS
    assert sorted(listed) == [path.name for path in folders(hooks.ROOT / "mmdeploy_llm")]


def test_the_map_says_what_each_folder_of_a_package_does(hooks):
    cells = "".join(re.findall(r"^\|([^|]+)\|", hooks.read(MAP), re.MULTILINE))
    for package in folders(hooks.ROOT / "mmdeploy_llm"):
        inner = {f"{package.name}/{each.name}/" for each in folders(package)}
        assert inner <= set(re.findall(r"`(\w+/\w+/)`", cells))


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_front_page_lists_the_packages_as_the_map_does(hooks, page):
    lines = re.findall(r"^- `\w+/` .*$", hooks.read(MAP), re.MULTILINE)
    found = re.findall(r"^- `\w+/` .*$", hooks.read(page), re.MULTILINE)
    if page == "README.md":
        assert found == lines
    assert [line.split()[1] for line in found] == [line.split()[1] for line in lines]


def test_the_table_of_the_decoder_names_its_fields(hooks):
    import decoder_table

    optional = [each.name for each in fields(DecoderConfig) if each.default is not MISSING]
    assert {*decoder_table.FAMILIES} | decoder_table.ALL == {*optional}
    rows = decoder_table.table().splitlines()
    (row,) = [row for row in rows if row.startswith("| `has_gate`")]
    assert "| `True` |  | dense MLPs multiply by a gate" in row
