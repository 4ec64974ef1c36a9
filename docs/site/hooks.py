"""What `mkdocs build` does to the pages of docs/.

A link may lead to any file of the repository: those outside docs/ become part of the site, under
their own paths. A comment `<!-- made: NAME -->` becomes what the function NAME of pages.py says.
"""

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")
_MADE = re.compile(r"<!-- made: (\w+) -->")
# GitHub wants bars in code of a table escaped, Python-Markdown shows the backslash
_ROW, _CODE = re.compile(r"^\|.*$", re.MULTILINE), re.compile(r"`[^`]+`")
_ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md")


def on_startup(**_: object) -> None:
    """Make pages from this checkout's code, whatever is installed."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tools")]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what links lead to outside docs/."""
    waiting = [*_ALWAYS, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not (ROOT / path).is_file():
            continue
        seen.add(path)
        if not path.startswith("docs/"):
            urls = config.use_directory_urls
            files.append(File(path, str(ROOT), config.site_dir, use_directory_urls=urls))
        if path.endswith(".md"):
            waiting += _targets(path, (ROOT / path).read_text())
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put in what is made, and turn links of the repository into links of the site."""
    here = page.file.src_uri
    markdown = _MADE.sub(lambda found: getattr(pages, found[1])(), markdown)
    markdown = _ROW.sub(lambda row: _CODE.sub(_plain, row[0]), markdown)
    return _LINK.sub(lambda found: _site_link(here, found[1]), markdown)


def _plain(code: re.Match[str]) -> str:
    return code[0].replace("\\|", "|")


def on_page_content(html: str, **_: object) -> str:
    """Make empty headings of tables plain cells: they head nothing."""
    return html.replace("<th></th>", "<td></td>")


def _targets(path: str, text: str) -> Iterator[str]:
    folder = posixpath.dirname(path)
    return (posixpath.normpath(f"{folder}/{link}".lstrip("/")) for link in _LINK.findall(text))


def _site_link(page: str, link: str) -> str:
    """`link` of a page of the repository, as the page at `page` of the site has it."""
    path = f"docs/{page}" if (ROOT / "docs" / page).is_file() else page
    target = next(_targets(path, f"]({link})"))
    if not (ROOT / target).is_file():
        return link
    return posixpath.relpath(target.removeprefix("docs/"), posixpath.dirname(page) or ".")
