"""The site as a reader meets it: headless Chromium, from files and from the server."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Playwright, Request, expect, sync_playwright
from site_tools import AWKWARD, NASTY, everything, rendered, served

from kvattn.site.collection import Query
from kvattn.site.export import export

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
REQUIRED = os.environ.get("KVATTN_REQUIRE_BROWSER") == "1"

pytestmark = pytest.mark.skipif(
    not CHROMIUM and not REQUIRED, reason="no chromium here (apt-get install chromium)"
)

PATIENCE = 300_000  # ms: a browser that hangs ends, one that is slow does not
expect.set_options(timeout=PATIENCE)

WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}

FA4 = "FA4 does not support updating KV cache in-place."
TRACEBACK = (
    f'Traceback (most recent call last):\n  File "a.py", line 3\nNotImplementedError: {FA4}\n'
)


LONGEST = max(everything().records, key=lambda each: len(each.sites))


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as running:
        yield running


@pytest.fixture(scope="module")
def browser(playwright: Playwright) -> Iterator[Browser]:
    assert CHROMIUM, "KVATTN_REQUIRE_BROWSER=1, but there is no chromium"
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with served(everything()) as base:
        yield f"{base}/"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("export") / "site"
    for path, content in rendered(everything()).items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes(content)
    return target


@pytest.fixture(params=["files", "server"])
def home(request: pytest.FixtureRequest) -> str:
    """The address of the index."""
    if request.param == "server":
        address: str = request.getfixturevalue("server")
        return address
    return f"{request.getfixturevalue('directory').as_uri()}/index.html"


def opened(browser: Browser, address: str, **options: Any) -> Page:
    """A page in a context of its own that fails on every complaint of the browser."""
    context = browser.new_context(**({"viewport": WIDE} | options))
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    page.on("requestfailed", lambda request: complaints.extend(failure(request)))
    page.complaints = complaints  # type: ignore[attr-defined]
    page.goto(address)
    return page


def failure(request: Request) -> list[str]:
    """Why it failed, unless the page was left before it was done."""
    left = request.failure is None or "ERR_ABORTED" in request.failure
    return [] if left else [f"{request.url} {request.failure}"]


@contextmanager
def followed(page: Page) -> Iterator[None]:
    """Until the page that this leads to is there; the one before has elements of the same names."""
    with page.expect_event("load"):
        yield


def closed(page: Page) -> None:
    assert page.complaints == []  # type: ignore[attr-defined]
    page.context.close()


def shown(page: Page) -> list[str]:
    """The codes in the list, in order."""
    return page.locator("#results li:not([hidden]) .code-name").all_inner_texts()


def address_of(home: str, code: str) -> str:
    """The page of an error, beside this index."""
    record = everything().get(code)
    assert record
    folder, _, file = home.rpartition("/")
    return f"{folder}/errors/{record.id}{'.html' if file else ''}"


def test_search_as_one_types(browser: Browser, home: str) -> None:
    page = opened(browser, home)
    everyone = len(everything().records)
    assert page.locator("#count").inner_text() == f"{everyone} errors"
    assert len(shown(page)) == everyone
    page.locator("#q").press_sequentially("kv12")
    some = shown(page)
    assert 0 < len(some) < everyone
    assert page.locator("#count").inner_text() == f"{len(some)} errors"
    page.locator("#q").press_sequentially("1")
    assert shown(page)[0] == "KV121"
    assert "q=kv121" in page.url
    page.reload()  # the address holds the search
    assert shown(page)[0] == "KV121"
    assert page.locator("#q").input_value() == "kv121"
    page.get_by_role("button", name="Clear search").click()
    assert len(shown(page)) == everyone
    assert "?" not in page.url
    page.locator("#q").fill("page qwertyuiop")
    assert shown(page) == []
    assert page.get_by_text("Nothing found").is_visible()
    closed(page)


WORDS = (
    *("", "kv121", "page table", "FA4", "rotary cos", "window", "q", "NotImplementedError k_cache"),
    *("page qwertyuiop", *NASTY),
)


def test_the_page_finds_what_the_server_finds(browser: Browser, home: str) -> None:
    page = opened(browser, home)
    for text in WORDS:
        page.locator("#q").fill(" ".join(text.split()))
        assert shown(page) == [each.code for each in everything().search(Query(text))], text
    for each in everything().records[::13]:
        if len(each.message) > 40:
            page.locator("#q").fill("Error: " + re.sub(r"\{[^{}]*\}", "[7]", each.message))
            assert each.code in shown(page)[:3]
    closed(page)


def test_enter_asks_the_server_for_what_is_alike(browser: Browser, server: str) -> None:
    page = opened(browser, server)
    page.locator("#q").fill("FA4 dose not suport updating of KV cache inplace")
    assert shown(page) == []
    assert page.get_by_text("Enter compares").is_visible()
    with followed(page):
        page.locator("#q").press("Enter")
    assert "SGL-01" in shown(page)
    assert "Nothing" not in page.locator("main").inner_text()
    closed(page)


def test_filters(browser: Browser, home: str) -> None:
    page = opened(browser, home)
    query = Query(project="kvattn", exception="AppendOverflowError", argument="cache_seqlens")
    for name in ("project", "exception", "argument"):
        page.get_by_label(name.capitalize()).select_option(getattr(query, name))
    assert shown(page) == [each.code for each in everything().search(query)] == ["KV121"]
    page.reload()
    assert shown(page) == ["KV121"]
    closed(page)


def test_from_the_list_to_a_page_and_back(browser: Browser, home: str) -> None:
    page = opened(browser, home)
    page.locator("#q").fill(TRACEBACK)
    first = page.locator("#results li:not([hidden])").first
    assert FA4 in first.inner_text()
    with followed(page):
        first.get_by_role("link").click()
    assert FA4 in page.locator(".message").inner_text()
    heading = page.get_by_role("heading", level=1).inner_text()
    page.get_by_role("navigation", name="On this page").get_by_role("link").last.click()
    assert page.url.endswith("#related")
    with followed(page):
        page.locator(".related a").first.click()
    assert page.get_by_role("heading", level=1).inner_text() != heading
    for way in ("next", "prev"):
        with followed(page):
            page.locator(f'.pager [rel="{way}"]').click()
    with followed(page):
        page.locator("aside").get_by_role("link").first.click()  # all errors of this project
    assert "project=" in page.url
    assert 0 < len(shown(page)) < len(everything().records)
    page.go_back()
    page.locator("#q").fill("kv121")
    with followed(page):
        page.locator("#q").press("Enter")
    assert shown(page)[0] == "KV121"
    closed(page)


def test_a_code_is_an_address(browser: Browser, home: str) -> None:
    folder, _, file = home.rpartition("/")
    page = opened(browser, f"{folder}/errors/KV121{'.html' if file else ''}")
    page.wait_for_selector(".message")  # a file leads there by itself
    record = everything().get("KV121")
    assert record
    assert page.get_by_role("heading", level=1).inner_text() == record.title
    closed(page)


def test_links_to_json(browser: Browser, home: str) -> None:
    page = opened(browser, address_of(home, "KV121"))
    with followed(page):
        page.locator("aside").get_by_role("link", name="JSON").click()
    record = everything().get("KV121")
    assert record
    assert json.loads(page.locator("pre").inner_text()) == json.loads(json.dumps(record.to_dict()))
    page.go_back()
    for name in ("JSON", "Schema", "OpenAPI"):
        with followed(page):
            page.get_by_role("contentinfo").get_by_role("link", name=name).click()
        assert isinstance(json.loads(page.locator("pre").inner_text()), dict)
        page.go_back()
    closed(page)


def test_keys(browser: Browser, home: str) -> None:
    page = opened(browser, home)

    def focused() -> str:
        return str(page.evaluate("document.activeElement.closest('li')?.innerText ?? ''"))

    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "q"
    page.keyboard.type("page/")  # a slash in the box is a letter
    assert page.locator("#q").input_value() == "page/"
    page.keyboard.press("Backspace")
    codes = shown(page)
    assert len(codes) > 3
    page.keyboard.press("ArrowDown")
    assert focused().startswith(codes[0])
    page.keyboard.press("ArrowDown")
    assert focused().startswith(codes[1])
    page.keyboard.press("End")
    assert focused().startswith(codes[-1])
    page.keyboard.press("ArrowDown")
    assert focused().startswith(codes[-1])
    page.keyboard.press("Home")
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.id") == "q"
    page.keyboard.press("Enter")
    assert focused().startswith(codes[0])
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowDown")
    with followed(page):
        page.keyboard.press("Enter")
    assert codes[0] in page.title()
    before = page.url
    with followed(page):
        page.keyboard.press("ArrowRight")
    assert page.url != before
    with followed(page):
        page.keyboard.press("ArrowLeft")
    assert page.url == before
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "q"
    closed(page)


def test_tab_reaches_everything_in_the_order_of_the_page(browser: Browser, home: str) -> None:
    page = opened(browser, address_of(home, "KV121"))
    wanted = page.evaluate(
        """[...document.querySelectorAll("a[href], button, input, summary, [tabindex='0']")]
        .filter((each) => each.checkVisibility())
        .map((each, number) => (each.dataset.number = number))"""
    )
    assert len(wanted) > 15
    seen = []
    for _ in wanted:
        page.keyboard.press("Tab")
        seen.append(page.evaluate("Number(document.activeElement.dataset.number)"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", seen
    assert seen == wanted
    closed(page)


def test_copy_buttons(browser: Browser, home: str) -> None:
    page = opened(
        browser, address_of(home, "KV121"), permissions=["clipboard-read", "clipboard-write"]
    )
    page.clock.install()
    page.reload()
    page.clock.pause_at(datetime.now() + timedelta(hours=1))  # what was said stays until told
    record = everything().get("KV121")
    assert record
    assert record.example
    for name, text in (
        ("Copy message", record.message),
        ("Copy before", record.example.before),
        ("Copy after", record.example.after),
        ("Copy guard", record.guard),
        ("Copy id", record.id),
    ):
        page.get_by_role("button", name=name, exact=True).click()
        expect(page.locator("#said")).to_have_text(name.replace("Copy", "Copied"))
        assert page.evaluate("navigator.clipboard.readText()") == text.rstrip()
        page.clock.run_for(1000)  # the button before falls silent, and not this one
        expect(page.locator("#said")).to_have_text(name.replace("Copy", "Copied"))
    page.clock.run_for(1000)
    expect(page.locator("#said")).to_be_empty()
    closed(page)


def contrast(page: Page) -> float:
    """Of text and page, from their colours as the browser computes them."""
    colours = page.evaluate(
        "['color', 'backgroundColor'].map((name) => getComputedStyle(document.body)[name])"
    )
    lights = []
    for colour in colours:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (lights[0] + 0.05) / (lights[1] + 0.05)


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_looks(browser: Browser, home: str, scheme: Any, width: int) -> None:
    """Light and dark, without sideways scrolling."""
    size = NARROW if width == 390 else WIDE
    page = opened(browser, home, color_scheme=scheme, viewport=size)
    for address in (home, address_of(home, "KV121"), address_of(home, LONGEST.code)):
        page.goto(address)
        ratio = contrast(page)
        assert (ratio < 1 / 7) if scheme == "light" else (ratio > 7)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ways = page.locator("pre").evaluate_all(
            "all => all.map(x => getComputedStyle(x).overflowX)"
        )
        assert set(ways) <= {"auto"}  # long lines of code scroll in their own box
    closed(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_axe_finds(browser: Browser, server: str, scheme: Any) -> None:
    """Contrast, names, roles, landmarks and more, by the rules of WCAG and good practice."""
    both = next(each for each in everything().records if len(each.sites) == 2 and each.guard)
    page = opened(browser, f"{server}?q=cache_seqlens+int32", color_scheme=scheme)
    assert len(shown(page)) > 2
    for address in (page.url, address_of(server, both.code)):
        page.goto(address)
        for details in page.locator("details summary").all():
            details.click()
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
    closed(page)


def test_pages_fit_a_narrow_screen(browser: Browser, server: str) -> None:
    page = opened(browser, server, viewport=NARROW)
    for each in everything().records[::23]:
        page.goto(address_of(server, each.code))
        assert page.evaluate("document.documentElement.scrollWidth") == 390, each.code
    closed(page)


def test_without_a_script(browser: Browser, home: str) -> None:
    page = opened(browser, home, java_script_enabled=False)
    assert len(shown(page)) == len(everything().records)
    page.goto(address_of(home, "KV121"))
    assert page.locator(".solutions li").count() == len(everything().get("KV121").solutions)  # type: ignore[union-attr]
    if home.startswith("http"):
        page.locator("#q").fill("kv121")
        with followed(page):
            page.locator("#q").press("Enter")
        assert page.url.endswith("/?q=kv121")
        assert shown(page)[0] == "KV121"
    closed(page)


def test_a_missing_page(browser: Browser, server: str) -> None:
    page = opened(browser, server)
    answer = page.goto(f"{server}errors/none")
    assert answer
    assert answer.status == 404
    complaints = page.complaints  # type: ignore[attr-defined]
    assert len(complaints) == 1  # the browser itself tells of the 404
    complaints.clear()
    with followed(page):
        page.get_by_role("main").get_by_role("link", name="All errors").click()
    assert len(shown(page)) == len(everything().records)
    closed(page)


def ran_nothing(page: Page) -> None:
    assert page.evaluate("document.querySelectorAll('script').length") == 1
    assert page.evaluate("document.querySelectorAll('main img').length") == 0


def test_hostile_texts_run_nothing(browser: Browser, home: str) -> None:
    page = opened(browser, home)
    for text in NASTY:
        page.locator("#q").fill(text)
        ran_nothing(page)
        page.reload()
        assert page.locator("#q").input_value() == text
        ran_nothing(page)
    closed(page)


def test_hostile_records_run_nothing(browser: Browser, tmp_path: Path) -> None:
    export(tmp_path / "site", AWKWARD)
    with served(AWKWARD) as base:
        for home in (f"{(tmp_path / 'site').as_uri()}/index.html", f"{base}/"):
            page = opened(browser, home, viewport=NARROW)
            ran_nothing(page)
            for each in AWKWARD.records:
                folder, _, file = home.rpartition("/")
                page.goto(f"{folder}/errors/{each.id}{'.html' if file else ''}")
                assert page.evaluate("document.querySelector('h1').textContent") == each.title
                assert page.evaluate("document.documentElement.scrollWidth") <= 390
                ran_nothing(page)
            closed(page)
