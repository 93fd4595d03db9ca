"""Hooks of mkdocs: links out of docs/, tutorials with their outputs, tables of options.

Pages link to each other as files of the repository, so that they can be read there. A link to a file outside of docs/,
such as a table of measured results, puts that file into the site, and a link to a folder a page that shows its files.
"""

from __future__ import annotations

import base64
import html
import json
import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

from docs.site.cells import BLOCK, DPI, EXECUTED, ROOT, notebook, tutorials

LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]*)(#[^)\s]*)?(?=\))")
MARKED = re.compile(r"^```python \w+$", re.MULTILINE)
OPTIONS = re.compile(r"^\[options\]\((\S+)\)$", re.MULTILINE)
TABLE = re.compile(r"^\| (?:option|argument|field) .*\n(?:\|.*\n)+", re.MULTILINE)
CODE = re.compile(r"(^```.*?^```$|^#[^\n]*$)", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"(?<![\[`])`(by|lab)\.(\w+)`(?![\]`])")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
slug = slugify(case="lower")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the navigation names and pages link to outside of docs/, and the notebooks with their images."""
    waiting = [target for target in in_nav(config.nav) if (ROOT / target).is_file()]
    waiting += [target for file in files.documentation_pages() for target in linked(file)]
    while waiting:
        target = waiting.pop()
        if files.get_file_from_path(site_uri(target)) is None:
            added = file_of(target, config)
            files.append(added)
            waiting += linked(added) if added.src_uri.endswith(".md") else []
    for page in tutorials():
        found = executed(page)
        content = json.dumps(found, indent=1, ensure_ascii=False)
        files.append(File.generated(config, f"tutorials/{page.stem}.ipynb", content=content))
        for name, image in images(page.stem, found):
            files.append(File.generated(config, f"tutorials/{name}", content=image))
    return files


@event_priority(100)  # before the others, which need the site's links
def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the page of a file of the repository one of the site."""
    source = repository_path(page.file)
    if not source.startswith("docs/"):  # tables of results have every word, many times
        page.meta.setdefault("search", {"boost": 0.1})
    text = MARKED.sub("```python", markdown)  # marks for the tests
    if not source.startswith("docs/reference/"):
        text = with_references(text)
    text = OPTIONS.sub(lambda found: options(source, found[1]), text)
    text = LINK.sub(lambda found: found[1] + site_link(source, found[2]) + (found[3] or ""), text)
    if ROOT / source in tutorials():
        text = with_outputs(text, page.file.name, executed(ROOT / source))
    return text


# Links.


def repository_path(file: File) -> str:
    """Where a file of the site is in the repository."""
    return file.src_uri if file.src_dir == str(ROOT) else f"docs/{file.src_uri}"


def site_uri(target: str) -> str:
    """Where a file or folder of the repository is in the site, where docs/index.md has the place of the README."""
    if target == "README.md":
        return "index.md"
    if (ROOT / target).is_dir():
        return f"{target}/index.md"
    return target.removeprefix("docs/")


def target_of(source: str, link: str) -> str | None:
    """The path in the repository that a link of a file means, if there is such a path."""
    if not link or ":" in link:
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return target if not target.startswith("..") and (ROOT / target).exists() else None


def in_nav(entry: Any) -> list[str]:
    """The paths in a navigation."""
    if isinstance(entry, str):
        return [entry]
    return [path for each in (entry.values() if isinstance(entry, dict) else entry or []) for path in in_nav(each)]


def linked(file: File) -> Iterator[str]:
    """The files and folders outside of docs/ that a page links to."""
    source = repository_path(file)
    targets = [target_of(source, link) for _, link, _ in LINK.findall(file.content_string)]
    return (target for target in targets if target is not None and not target.startswith("docs/"))


def site_link(source: str, link: str) -> str:
    """A link between files of the repository as one between those of the site; a wrong one as it is, for mkdocs."""
    target = target_of(source, link)
    return link if target is None else relative(site_uri(target), site_uri(source))


def relative(target: str, source: str) -> str:
    """The link from one path to another."""
    return posixpath.relpath(target, posixpath.dirname(source) or ".")


def with_references(text: str) -> str:
    """A page whose first mention of a name of the reference, such as `by.predict`, outside of code links there."""
    mentioned: set[str] = set()

    def link(found: re.Match[str]) -> str:
        path = f"bayesify.{found[2]}" if found[1] == "by" else f"bayesify.lab.{found[2]}"
        if path in mentioned or path not in in_reference():
            return found[0]
        mentioned.add(path)
        return f"[{found[0]}][{path}]"

    return "".join(part if part.startswith(("```", "#")) else NAME.sub(link, part) for part in CODE.split(text))


@cache
def in_reference() -> set[str]:
    """The paths of all names in the reference."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    return {
        path for page in pages for path in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }


def file_of(target: str, config: MkDocsConfig) -> File:
    """A file of the repository, or a page that shows the files of a folder."""
    path = ROOT / target
    if not path.is_dir():
        return File(target, str(ROOT), config.site_dir, config.use_directory_urls)
    shown = [f"## {file.name}\n\n```\n{file.read_text(encoding='utf-8')}```\n" for file in sorted(path.glob("*.*"))]
    return File.generated(config, site_uri(target), content="\n".join([f"# {target}\n", *shown]))


# Tutorials.


def executed(page: Path) -> dict[str, Any]:
    """A tutorial's notebook: with its outputs, if the code that was executed is what the page has now."""
    plain, path = notebook(page.read_text(encoding="utf-8")), EXECUTED / f"{page.stem}.ipynb"
    if not path.is_file():
        return plain
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    now, then = ([cell for cell in book["cells"] if cell["cell_type"] == "code"] for book in (plain, found))
    if [cell["source"] for cell in now] == [cell["source"] for cell in then]:
        for new, old in zip(now, then, strict=True):
            new |= {"outputs": old["outputs"], "execution_count": old["execution_count"]}
    return plain


def shown(name: str, book: dict[str, Any]) -> Iterator[list[tuple[str, Any]]]:
    """What each code cell shows: texts as ("", text), images as (name of the file, bytes)."""
    number = 0
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            found: list[tuple[str, Any]] = []
            for output in cell["outputs"]:
                data = output.get("data", {})
                if "image/png" in data:
                    number += 1
                    found.append((f"{name}_{number}.png", base64.b64decode(data["image/png"])))
                elif found and not found[-1][0]:  # what is printed comes in pieces
                    found[-1] = ("", found[-1][1] + output.get("text", data.get("text/plain")))
                else:
                    found.append(("", output.get("text", data.get("text/plain"))))
            yield found


def images(name: str, book: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """The images of a notebook."""
    return (output for outputs in shown(name, book) for output in outputs if output[0])


def with_outputs(text: str, name: str, book: dict[str, Any]) -> str:
    """A tutorial with what each block shows after it, and below the title a link to the notebook."""
    cells = shown(name, book)
    text = BLOCK.sub(lambda block: block[0] + "".join(markdown_of(*output) for output in next(cells)), text)
    title, rest = text.split("\n", 1)
    return f"{title}\n\n[Download this page as a notebook]({name}.ipynb){{ .md-button .notebook }}\n{rest}"


def markdown_of(image: str, content: Any) -> str:
    """An output of a cell in the page."""
    if not image:
        return f'\n<pre class="output"><code>{html.escape(content.rstrip())}</code></pre>\n'
    width = int.from_bytes(content[16:20]) * 96 // DPI  # where a PNG file has its width
    return f'\n![What this code draws]({image}){{ width="{width}" }}\n'


# Options.


def options(source: str, link: str) -> str:
    """The table of options below a heading of another page, for a link to it: `[options](../page.md#heading)`."""
    path, _, anchor = link.partition("#")
    target = target_of(source, path)
    text = "" if target is None else (ROOT / target).read_text(encoding="utf-8")
    starts = [heading.end() for heading in HEADING.finditer(text) if anchor in ("", slug(heading[1], "-"))]
    table = TABLE.search(text, starts[0]) if starts else None
    if target is None or table is None:
        raise PluginError(f"{source}: [options]({link}): there is no table of options")

    def from_here(found: re.Match[str]) -> str:
        there = target_of(target, found[2]) if found[2] else target
        return found[0] if there is None else f"{found[1]}{relative(there, source)}{found[3] or ''}"

    return LINK.sub(from_here, table[0])
