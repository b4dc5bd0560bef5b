"""The page as text anywhere, and in a real browser where one is installed."""

import base64
import hashlib
import importlib.util
import json
import re
import shutil

import numpy as np
import pytest

from flaxformer_min.plots.attention_page import attention_page

SOURCE = ["▁the", "▁c", "</script><script>document.title='broken'</script>", "</s>"]
TARGET = ["▁고양이", "&amp;", "</s>"]
READ = ["<s>", "▁고양이", "&amp;"]


def one_hot(layers: int, heads: int, queries: int, keys: int) -> np.ndarray:
    """Head h of layer l: query q looks at key q + h + l (around the corner) with 3/4, at 0 with
    the rest."""
    layer, head, query = np.indices((layers, heads, queries))
    weights = 0.75 * np.eye(keys)[(layer + head + query) % keys]
    weights[..., 0] += 0.25
    return weights


@pytest.fixture(scope="module")
def maps():
    shapes = {"encoder": (2, 2, 4, 4), "decoder": (2, 2, 3, 3), "cross": (2, 2, 3, 4)}
    return {name: one_hot(*shape) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def page(maps):
    languages = {"source_language": "en", "target_language": "ko"}
    return attention_page(maps, SOURCE, TARGET, read_tokens=READ, **languages)


def scripts(page: str) -> list[str]:
    """What stands between script tags, as a browser cuts it: the data, and the program."""
    return re.findall(r"<script\b[^>]*>(.*?)</script\b", page, re.DOTALL | re.IGNORECASE)


def test_tokens_and_weights_come_through_to_four_digits(page, maps):
    data = json.loads(scripts(page)[0])
    assert data["tokens"] == {"source": SOURCE, "target": TARGET, "target so far": READ}
    for name, weights in maps.items():
        np.testing.assert_array_equal(np.array(data["maps"][name]["weights"]) / 10_000, weights)
    thirds = attention_page({"cross": [[[[1 / 3, 2 / 3]]]]}, ["a", "b"], ["c"])
    assert json.loads(scripts(thirds)[0])["maps"]["cross"]["weights"] == [[[[3333, 6667]]]]


@pytest.mark.parametrize("token", ["</script>", "<!--<script>", "</SCRIPT ", "\u2028", "\ud800"])
def test_no_token_gets_out_of_the_data(token):
    page = attention_page({"decoder": np.ones((1, 1, 1, 1))}, [], [token])
    data, program = scripts(page)
    assert json.loads(data)["tokens"]["target"] == [token]
    assert program.lstrip().startswith('"use strict"')
    page.encode()


def test_the_page_links_to_nothing_and_evaluates_nothing(page):
    assert not re.search(r"\s(src|href|action)\s*=", page)
    assert not re.search(r"https?://|url\(|@import|fetch\(|eval\(|Function\(|innerHTML", page)
    digest = base64.b64encode(hashlib.sha256(scripts(page)[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert "default-src 'none'" in page


@pytest.mark.parametrize(
    "name, part, tokens, error",
    [
        ("self", slice(None), (SOURCE, TARGET), r"cross, encoder, decoder; got \['self'\]"),
        ("cross", slice(None), (TARGET, SOURCE), r"maps\['cross'\] must be .*for 4 and 3 tokens"),
        ("cross", 0, (SOURCE, TARGET), r"\[layers heads queries keys\].*\(2, 3, 4\)"),
    ],
)
def test_maps_of_another_name_or_shape_are_refused(maps, name, part, tokens, error):
    with pytest.raises(ValueError, match=error):
        attention_page({name: maps["cross"][part]}, *tokens)


@pytest.fixture(scope="module")
def browser():
    if importlib.util.find_spec("selenium") is None:
        pytest.skip("no selenium: the extra `browser`")
    names = ("chromium", "chromium-browser", "google-chrome")
    binary = next(filter(None, map(shutil.which, names)), None)
    driver_path = shutil.which("chromedriver")
    if not binary or not driver_path:
        pytest.skip("no Chromium with chromedriver; apt install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "window-size=1000,800"):
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(options, Service(driver_path))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, page, tmp_path):
    """The page, opened anew in a light scheme; afterwards nothing may have gone wrong in it."""
    file = tmp_path / "attention.html"
    file.write_text(page, encoding="utf-8")
    prefer(browser, "light")
    browser.get(file.as_uri())
    yield browser
    assert browser.get_log("browser") == []


def prefer(browser, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def press(browser, *names: str) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    for name in names:
        ActionChains(browser).send_keys(getattr(Keys, name)).perform()


def choose(browser, name: str, text: str) -> None:
    from selenium.webdriver.support.ui import Select

    Select(browser.find_element("id", name)).select_by_visible_text(text)


def told(browser) -> str:
    return browser.find_element("id", "summary").text


def shares(browser) -> list[str]:
    return [each.text for each in browser.find_elements("css selector", "#keys small")]


def test_it_opens_with_the_last_layers_cross_attention(opened):
    """Layer 2, heads 1 and 2: token 0 looks at 1 and 2 with 3/8 each, at 0 with 1/4."""
    assert opened.title == "What each token attends to"
    assert shares(opened) == ["25 %", "38 %", "38 %", ""]
    assert told(opened).startswith("“고양이” attends to “c” 38 %, “</script>")
    assert told(opened).endswith("“the” 25 %.")


def test_layers_heads_maps_and_tokens_can_be_chosen(opened):
    from selenium.webdriver import ActionChains

    choose(opened, "layer", "1 of 2")
    choose(opened, "head", "1 of 2")
    assert told(opened) == "“고양이” attends to “the” 100 %."
    choose(opened, "map", "Encoder self-attention: source attends to source")
    assert told(opened) == "“the” attends to “the” 100 %."
    assert len(opened.find_elements("css selector", "#queries li")) == 4
    choose(opened, "map", "Decoder self-attention: target attends to the target so far")
    choose(opened, "layer", "2 of 2")
    assert told(opened) == "“고양이” attends to “고양이” 75 %, “<s>” 25 %."
    tokens = opened.find_elements("css selector", "#queries li")
    ActionChains(opened).move_to_element(tokens[1]).perform()
    assert told(opened) == "“&amp;” attends to “&amp;” 75 %, “<s>” 25 %."
    assert shares(opened) == ["25 %", "", "75 %"]


def test_everything_can_be_reached_with_the_keyboard(opened):
    press(opened, *["TAB"] * 3, "ARROW_DOWN")  # to the heads: from the mean to the first
    press(opened, "TAB")
    assert opened.switch_to.active_element.get_attribute("aria-label") == "고양이"
    press(opened, "ARROW_RIGHT", "ARROW_RIGHT", "ARROW_LEFT")
    assert told(opened).startswith("“&amp;” attends to “</script>")
    press(opened, "END", "ARROW_RIGHT")
    assert told(opened).startswith("“</s>” attends to")
    press(opened, "HOME", "ARROW_UP")
    assert told(opened).startswith("“고양이” attends to")


def test_a_screen_reader_finds_names_and_roles(opened):
    opened.execute_cdp_cmd("Accessibility.enable", {})
    tree = opened.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    found = [
        (node["role"]["value"], node.get("name", {}).get("value"))
        for node in tree
        if "role" in node
    ]
    for name in ("Attention", "Layer", "Head"):
        assert ("combobox", name) in found
    assert ("listbox", "Queries: tokens of the target") in found
    assert ("list", "Looked at: tokens of the source") in found
    assert ("option", "고양이") in found
    assert "status" in [role for role, _ in found]
    assert opened.find_element("id", "summary").get_attribute("aria-live") == "polite"
    assert opened.find_element("id", "queries").get_attribute("lang") == "ko"
    reached_by_tab = opened.find_elements("css selector", "#queries [tabindex='0']")
    assert [each.get_attribute("aria-selected") for each in reached_by_tab] == ["true"]


def test_tokens_are_text_not_markup(opened):
    texts = [each.text for each in opened.find_elements("css selector", "#queries li")]
    assert texts == ["␣고양이", "&amp;", "</s>"]
    assert "document.title='broken'" in opened.find_element("id", "keys").text
    assert opened.title == "What each token attends to"


def luminance(rgb) -> float:
    """WCAG 2, relative luminance."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def rgba(text: str) -> np.ndarray:
    numbers = [float(number) for number in re.findall(r"[\d.]+", text)]
    return np.array([*(c / 255 for c in numbers[:3]), *(numbers[3:] or [1.0])])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_even_the_warmest_token_is_readable_in_both_schemes(opened, scheme):
    """WCAG 2.1 AA asks for a contrast of 4.5."""
    prefer(opened, scheme)
    choose(opened, "layer", "1 of 2")
    choose(opened, "head", "1 of 2")  # a weight of 1: the strongest colour there is
    style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    ink, heat, card = (
        rgba(opened.execute_script(style, *what))
        for what in [("#keys li", "color"), ("#keys li", "backgroundColor")]
        + [("section", "backgroundColor")]
    )
    ground = heat[3] * heat[:3] + (1 - heat[3]) * card[:3]
    low, high = sorted([luminance(ink[:3]), luminance(ground)])
    assert (high + 0.05) / (low + 0.05) >= 4.5
    assert (luminance(card[:3]) > 0.5) == (scheme == "light")


def test_nothing_is_loaded_and_nothing_overflows(opened):
    assert opened.execute_script("return performance.getEntriesByType('resource').length") == 0
    phone = {"width": 320, "height": 640, "deviceScaleFactor": 1, "mobile": True}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    wide = opened.execute_script("return document.documentElement.scrollWidth")
    opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wide <= 320
