"""The page of the server in a real Chromium: typing, looking inside, and who can use it."""

import importlib.util
import os
import re
import shutil
from pathlib import Path

import pytest
from served import Access, FakePair, serving

if importlib.util.find_spec("playwright") is None:
    pytest.skip("no playwright: the extra `browser`", allow_module_level=True)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
if CHROMIUM is None:
    pytest.skip("no Chromium; apt install chromium", allow_module_level=True)

from playwright.sync_api import expect, sync_playwright

pytestmark = pytest.mark.slow

WORDS = "#translation [role=option]"
AXE = Path(os.environ.get("AXE_CORE", "node_modules/axe-core/axe.min.js"))


@pytest.fixture(scope="module")
def server():
    pairs = FakePair("en", "de"), FakePair("de", "en"), FakePair("en", "he", prefix="שלום ")
    with serving(*pairs) as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Open the page of a server; at the end nothing may have gone wrong in it."""
    contexts, wrong = [], []

    def open_page(server, width=1000, scheme="light", **options):
        viewport = {"width": width, "height": 800}
        contexts.append(browser.new_context(viewport=viewport, color_scheme=scheme, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.wrong = wrong
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        asked = page.asked = []
        page.goto(server.address)
        expect(page.locator("#source option").first).to_be_attached()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def page(server, open_page):
    page = open_page(server)
    page.select_option("#source", "en")
    page.select_option("#target", "de")
    return page


def test_what_is_typed_is_translated_once_the_typing_pauses(page):
    page.locator("#text").press_sequentially("Hello there.\n  Bye", delay=20)
    expect(page.locator("#translation")).to_have_text("HELLO THERE.\n  BYE", use_inner_text=True)
    assert sum(url.endswith("/translate") for url in page.asked) <= 2
    expect(page.locator("#count")).to_have_text("18 of 20,000 characters")
    page.fill("#text", "hello")
    expect(page.locator("#alternatives li")).to_have_text(["HELLO!", "HELLO?"])
    page.fill("#text", "")
    expect(page.locator("#translation")).to_have_text("")
    expect(page.locator("#details")).to_be_hidden()


def test_words_are_shaded_by_how_unsure_the_model_is(page):
    """The fake pair gives a word of n letters the probability 1/n."""
    page.fill("#text", "a abcd")
    expect(page.locator(WORDS)).to_have_count(2)
    sure, unsure = page.locator(WORDS).all()
    assert sure.evaluate("each => each.style.backgroundColor") == "rgba(var(--doubt), 0.00)"
    assert unsure.evaluate("each => each.style.backgroundColor") == "rgba(var(--doubt), 0.75)"
    assert [each.get_attribute("class") for each in (sure, unsure)] == [None, "doubtful"]
    expect(unsure).to_have_attribute("aria-label", "ABCD, 25 %")


def test_pointing_at_a_word_shows_what_it_attends_to(page):
    """The fake pair: each word attends to the word at its place."""
    page.fill("#text", "Look here. See it")
    page.locator(WORDS).nth(3).hover()
    expect(page.locator("#summary")).to_have_text(re.compile("^“IT” .* attends to “it” 100 %,"))
    expect(page.locator("#sources li")).to_have_text(["␣See", "␣it100 %", "</s>"])
    page.locator(WORDS).nth(0).hover()
    expect(page.locator("#sources li")).to_have_text(["␣Look100 %", "␣here.", "</s>"])


def test_everything_can_be_reached_with_the_keyboard(page):
    page.fill("#text", "a b c")
    expect(page.locator(WORDS)).to_have_count(3)
    page.focus("#target")
    page.keyboard.press("Tab")
    for key, word in (("ArrowRight", "B"), ("End", "C"), ("ArrowRight", "C"), ("Home", "A")):
        page.keyboard.press(key)
        expect(page.locator(f"{WORDS}:focus")).to_have_text(word)
        expect(page.locator("[aria-selected=true]")).to_have_text(word)
        expect(page.locator("#summary")).to_contain_text(f"“{word}”")


def test_languages_are_those_served_and_can_be_swapped(page):
    assert page.locator("#source option").all_inner_texts() == ["German", "English"]
    assert page.locator("#target option").all_inner_texts() == ["German", "Hebrew"]
    page.fill("#text", "hello")
    expect(page.locator("#translation")).to_have_text("HELLO")
    page.click("#swap")
    assert (page.input_value("#source"), page.input_value("#target")) == ("de", "en")
    assert page.input_value("#text") == "HELLO"
    expect(page.locator("#swap")).to_be_visible()
    expect(page.locator("#text")).to_have_attribute("lang", "de")
    expect(page.locator("#translation")).to_have_attribute("lang", "en")


def test_a_language_from_right_to_left_is_shown_so(page):
    page.select_option("#target", "he")
    page.fill("#text", "a b")
    expect(page.locator(WORDS)).to_have_count(3)
    expect(page.locator("#translation")).to_have_attribute("lang", "he")
    expect(page.locator("#translation")).to_have_css("direction", "rtl")
    expect(page.locator("#swap")).to_be_hidden()


def test_a_problem_is_told_and_goes_away(page):
    page.fill("#text", "fail")
    expect(page.locator("#problem")).to_have_text("Cannot translate text")
    assert "status of 500" in page.wrong.pop()
    page.fill("#text", "<b>x</b> &amp; <img src=x onerror=alert(1)>")
    expect(page.locator("#translation")).to_have_text("<B>X</B> &AMP; <IMG SRC=X ONERROR=ALERT(1)>")
    expect(page.locator("#problem")).to_be_hidden()
    assert page.locator("main b, main img").count() == 0, "a translation is text, not markup"


def test_a_key_can_be_given(open_page):
    with serving(access=Access(keys=("thekey",))) as server:
        page = open_page(server)
        page.fill("#key", "thekey")
        page.fill("#text", "hello")
        expect(page.locator("#translation")).to_have_text("HELLO")


def test_a_phone_shows_it_without_scrolling_sideways(server, open_page):
    page = open_page(server, width=320)
    page.fill("#text", "donaudampfschifffahrtsgesellschaftskapitaensmuetze " * 3)
    expect(page.locator(WORDS)).to_have_count(3)
    assert page.evaluate("document.documentElement.scrollWidth") == 320


@pytest.mark.parametrize("width", [320, 1000])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(server, open_page, scheme, width):
    """Names, roles, contrast: WCAG's rules as far as a program can check them."""
    if not AXE.exists():
        pytest.skip(f"no {AXE}: npm install axe-core, or AXE_CORE=FILE")
    page = open_page(server, width, scheme, bypass_csp=True)
    page.select_option("#source", "en")
    page.fill("#text", "a ab abcdefghijklm. Second sentence here")
    expect(page.locator(WORDS)).to_have_count(6)
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run()")
    assert [(each["id"], each["help"]) for each in found["violations"]] == []
    assert len(found["passes"]) > 20
