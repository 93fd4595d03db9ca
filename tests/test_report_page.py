"""The report in a browser: it sorts, is whole by itself, and everyone can read it; and so is the page of the demo."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import demo
import demo_report
import pytest
import torch
from comparisons import enrich
from sklearn.datasets import load_digits

from bayesify.lab.comparison.compare_recipes import compare
from bayesify.lab.report import write_report
from bayesify.lab.report.figures import style

playwright = pytest.importorskip("playwright.sync_api", reason="no browser tests: playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no browser tests: axe is not installed")

SHORT = {"training": {"epochs": 1}, "evaluation": {"samples": 4}}
DIGITS = {"name": "digits", "limit": 200, "batch_size": 50, "validation": 0.4, "test": 0.4}
PLAIN = {"data": DIGITS, "model": {"name": "cnn", "options": {"pool": "flatten"}}, **SHORT}
METHODS = {"plain longer": "none", "Rank1": "Rank1", "IBNN": "IBNN", "ECMP": "ECMP"}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE, PAPER, DESK = 360, 700, 1100
"""Widths in pixels; that of A4 is what margins of an inch and less leave."""

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser tests: no chromium; `make browser` installs Debian's"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of models trained for one epoch, with shifts and an attack too."""
    folder = tmp_path_factory.mktemp("report")
    torch.manual_seed(0)
    recipes = {name: {"method": method, **SHORT} for name, method in METHODS.items()}
    found = compare(recipes, folder, seeds=1, base=PLAIN, progress=False)
    for row in found.rows:
        for run in row.runs:
            enrich(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "DOTS", 40)  # the page shows the figures as SVG
        write_report([run for row in found.rows for run in row.runs], folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def demo_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the demo, of one fold that was trained for one epoch."""
    digits = load_digits()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "EPOCHS", 1)
        fold = demo.one_fold(torch.from_numpy(digits.images / 16).float()[:, None], torch.from_numpy(digits.target), 0)
    folder = tmp_path_factory.mktemp("demo")
    demo_report.write([fold], folder)
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Any, report: Path) -> Iterator[Any]:
    """Opens the page; in the end no request has left it and the console has said nothing."""
    contexts, said, asked = [], [], []

    def visit(path: Path = report, width: int = DESK, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        context.route("**/*", lambda route: (asked.append(route.request.url), route.continue_()))
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(path.as_uri())
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not said
    assert asked and all(url.startswith(("file:", "data:")) for url in asked)


def column(page: Any, head: str, table: str = "#table-all") -> list[str]:
    """What a table has under a heading, from top to bottom."""
    heads = [
        text.replace("\u00a0", " ").strip()
        for text in page.locator(f"{table} thead tr:last-child th").all_inner_texts()
    ]
    cells = page.locator(f"{table} tbody tr > :nth-child({heads.index(head) + 1})")
    return [cell.get_attribute("data-value") or "" for cell in cells.all()]


def names(page: Any) -> list[str]:
    return list(page.locator("#table-all tbody th").all_inner_texts())


def test_tables_sort_by_mouse(visit: Any) -> None:
    page = visit()
    before = names(page)
    nll = page.locator("#table-all th", has_text="NLL")
    nll.get_by_role("button").click()
    assert nll.get_attribute("aria-sort") == "ascending"  # the best first
    values = [float(value) for value in column(page, "NLL")]
    assert values == sorted(values) and len(values) == len(before)
    nll.get_by_role("button").click()
    assert nll.get_attribute("aria-sort") == "descending"
    assert [float(value) for value in column(page, "NLL")] == values[::-1]
    assert sorted(names(page)) == sorted(before) and names(page) != before
    page.get_by_role("region", name="All models").get_by_role("button", name="accuracy").click()
    assert nll.get_attribute("aria-sort") is None
    accuracy = [float(value) for value in column(page, "accuracy %")]
    assert accuracy == sorted(accuracy, reverse=True)


def test_tables_sort_by_keyboard(visit: Any) -> None:
    page = visit()
    head = page.locator("#table-all th", has_text="epistemic")
    head.get_by_role("button").focus()
    page.keyboard.press("Enter")
    values = column(page, "noise AUROC epistemic %")
    known = [float(value) for value in values if value]
    assert head.get_attribute("aria-sort") == "descending" and known == sorted(known, reverse=True)
    assert values[-2:] == ["", ""]  # plain networks have none, and stay at the end
    page.keyboard.press("Space")
    assert head.get_attribute("aria-sort") == "ascending"
    assert column(page, "noise AUROC epistemic %") == [*values[:-2][::-1], "", ""]
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    assert page.locator("#table-all th[aria-sort]").inner_text().split() == ["ECE", "%"]


def test_models_sort_by_name(visit: Any) -> None:
    page = visit()
    before = names(page)
    page.locator("#table-all th", has_text="model").first.get_by_role("button").click()
    assert names(page) == sorted(before, key=str.casefold) != before


def test_without_scripts_everything_is_there(visit: Any) -> None:
    page = visit(java_script_enabled=False)
    assert page.locator("th button").count() == 0
    assert page.locator("#table-all tbody tr").count() == len(names(page)) > 3 and page.locator("figure").count() > 30


@pytest.mark.parametrize(("scheme", "width"), [("light", DESK), ("dark", DESK), ("light", PHONE)])
def test_axe_finds_nothing_to_mend(visit: Any, scheme: str, width: int) -> None:
    page = visit(color_scheme=scheme, width=width)
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("scheme", "width"), [("light", DESK), ("dark", PHONE)])
def test_everyone_can_read_the_page_of_the_demo(visit: Any, demo_page: Path, scheme: str, width: int) -> None:
    page = visit(demo_page, color_scheme=scheme, width=width)
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    narrow = "[...document.querySelectorAll('li p')].filter((each) => each.scrollWidth > each.clientWidth).length"
    assert page.evaluate(narrow) == 0


def test_contrast_is_really_measured(visit: Any) -> None:
    page = visit()
    page.evaluate("document.querySelector('.note').style.color = '#bbb'")
    found = axe.Axe().run(page, context=".note", options={"runOnly": ["color-contrast"]})
    assert [each["id"] for each in found.response["violations"]] == ["color-contrast"]


def test_colours_follow_the_reader_and_paper_is_white(visit: Any) -> None:
    page = visit(color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    text = "getComputedStyle(document.querySelector('figure svg text')).fill"
    assert page.evaluate(ground) == "rgb(20, 23, 27)" and page.evaluate(text) in (
        "rgb(168, 177, 189)",
        "rgb(230, 233, 237)",
    )
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible() and not page.locator(".files").first.is_visible()


def test_nothing_is_cut_off_or_folded_on_paper(visit: Any) -> None:
    page = visit(width=PAPER)
    page.emulate_media(media="print")
    folded = page.locator("details:not([open])").count()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert folded > 5 and page.locator("details:not([open])").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= PAPER
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not([open])").count() == folded


def test_on_a_phone_the_page_is_short_and_its_sections_unfold(visit: Any) -> None:
    page = visit(width=390)
    sections, folded = page.locator("details.section"), page.locator("details.section:not([open])")
    assert sections.count() > 8 and folded.count() == sections.count() - 1
    height = page.evaluate("document.documentElement.scrollHeight")
    assert height < 3600 and page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator("nav a", has_text="Calibration").click()
    page.wait_for_function("document.querySelector('#calibration').open")
    assert page.locator("#calibration figure svg").first.is_visible()
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.evaluate("document.documentElement.scrollHeight") > 3 * height
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert visit(width=DESK).locator("details.section:not([open])").count() == 0


def test_figures_tell_their_values_under_the_pointer(visit: Any) -> None:
    page = visit()
    mark = page.locator("#selective .wide .hit").nth(12)
    mark.scroll_into_view_if_needed()
    mark.hover()
    tip = page.locator(".tip")
    words = tip.inner_text()
    assert tip.is_visible() and words.startswith("error rate, %, at ") and all(f"{name} " in words for name in METHODS)
    page.locator("h1").hover()
    assert not tip.is_visible()
    plain = visit(java_script_enabled=False)  # then the browser's own tooltips are there
    assert "% coverage" in (plain.locator("#selective .wide .hit title").first.text_content() or "")


def test_names_break_at_their_joints_only(visit: Any) -> None:
    page = visit(width=PHONE)
    lines = """name => {
        const head = document.querySelector("#table-all tbody th"), range = new Range();
        head.textContent = name;
        range.selectNodeContents(head);
        return new Set([...range.getClientRects()].map((each) => each.top)).size;
    }"""
    assert page.evaluate(lines, "temperature") == 1 and page.evaluate(lines, "another temperature") == 2
    joined = """() => {
        const head = document.querySelector("#table-all tbody th"), before = head.offsetHeight;
        head.innerHTML = "Batch<wbr>Ensemble<wbr>Of<wbr>Many";
        return head.offsetHeight - before;
    }"""
    assert visit().evaluate(joined) == 0  # where there is room


def test_the_keyboard_reaches_the_numbers_and_the_folded_parts(visit: Any) -> None:
    page = visit()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    page.locator("summary", has_text="Each corruption").focus()
    page.keyboard.press("Enter")
    assert page.locator("figure.many svg").first.is_visible()
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"


def test_files_come_out_of_the_page_alone(visit: Any, report: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copy(report, tmp_path / "alone.html"))
    page = visit(alone, accept_downloads=True)
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    for name in ("risk.png", "risk.csv", "comparison.csv", "gallery-1-plain-network.png"):
        with page.expect_download() as download:
            page.locator(f"a[download='{name}']").click()
        download.value.save_as(tmp_path / name)
        assert (tmp_path / name).read_bytes() == (report.with_name("report_files") / name).read_bytes()
    offered = {link.get_attribute("download") for link in page.locator("a[download]").all()}
    assert offered == {path.name for path in report.with_name("report_files").iterdir()}
