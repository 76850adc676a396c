"""The Chinese side of the site, in the same build: its navigation, the words of the theme, and the
switch of languages in the header."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from chinese import FOLDER

SUFFIX = "（英文）"  # after the title of a page that exists in English only
NAMES = {"en": "English", "zh": "中文"}


def navigation(nav: Any, files: Any, config: Any) -> Any:
    """Returns the navigation of the Chinese pages: that of the English ones, in Chinese, with links
    to the English pages where there is no other."""
    from mkdocs.structure.nav import Link, Navigation, Section
    from mkdocs.structure.pages import Page

    titles: Mapping[str, str] = config.extra["chinese"]
    pages: list[Any] = []

    def turn(item: Any) -> Any:
        if item.is_section:
            section = Section(titles[item.title], [turn(each) for each in item.children])
            for child in section.children:
                child.parent = section
            return section
        file = files.get_file_from_path(FOLDER + item.file.src_uri)
        if file is None:
            return Link(titles[item.title] + SUFFIX, item.file.url)
        pages.append(Page(titles[item.title], file, config))
        return pages[-1]

    items = [turn(item) for item in nav.items]
    for before, after in pairwise(pages):
        before.next_page, after.previous_page = after, before
    made = Navigation(items, pages)
    made.homepage = pages[0]
    return made


def switch(page: Any, files: Any, config: Any) -> None:
    """Sets the language of the theme for a page, and where its switch leads: to the same page, else
    to the front page of the other language."""
    uri = page.file.src_uri
    is_chinese = uri.startswith(FOLDER)
    plain = uri.removeprefix(FOLDER)
    own = FOLDER + plain if files.get_file_from_path(FOLDER + plain) else f"{FOLDER}index.md"
    links = {"en": files.get_file_from_path(plain).url, "zh": files.get_file_from_path(own).url}
    config.theme["language"] = "zh" if is_chinese else "en"
    config.extra["alternate"] = [
        {"lang": lang, "name": NAMES[lang], "link": link} for lang, link in links.items()
    ]
