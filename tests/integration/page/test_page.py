"""Test the page of a run in a real browser."""

import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from flashmoa.cli import trace as command
from flashmoa.observe import Event, FirstToken
from flashmoa.observe.calls import calls
from flashmoa.observe.page import page
from flashmoa.observe.trace import read
from tests.integration.page.chromium import ARGUMENTS, NoChromium, chromium
from tests.integration.page.runs import HOSTILE, hostile, long_run

# A real run of examples/chain.py.
RUN = Path(__file__).parents[3] / "docs" / "images" / "run.jsonl"

Show = Callable[..., Page]

# The machine may be busy.
expect.set_options(timeout=30_000)


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    try:
        executable, environment = chromium()
    except NoChromium as missing:
        pytest.skip(str(missing))
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=executable, args=ARGUMENTS, env=environment
        )
        yield launched
        launched.close()


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Generator[Show]:
    """Open the page of a run; check at the end that it had no errors and loaded nothing."""
    errors: list[str] = []

    def open_page(events: Sequence[Event], **context: Any) -> Page:
        file = tmp_path / "run.html"
        file.write_text(page(events, "run.jsonl"), encoding="utf-8")
        shown = browser.new_page(viewport={"width": 1400, "height": 900}, **context)
        shown.on("console", lambda message: errors.append(message.text))
        shown.on("pageerror", lambda error: errors.append(str(error)))
        shown.on("dialog", lambda dialog: errors.append(dialog.message))
        shown.on("request", lambda request: requested.append(request.url))
        requested: list[str] = []
        shown.goto(file.as_uri())
        expect(shown.locator("#lanes .decode").first).to_be_attached()
        assert requested == [file.as_uri()]
        pages.append((shown, requested))
        return shown

    pages: list[tuple[Page, list[str]]] = []
    yield open_page
    for shown, requested in pages:
        assert len(requested) == 1
        shown.close()
    assert errors == []


def test_an_answer_that_came_as_a_whole_has_no_time_to_its_first_token(show: Show) -> None:
    first, *rest = [event for event in long_run(3) if isinstance(event, FirstToken)]
    assert first.call_id == "c0"  # It is no hit.
    shown = show([event for event in long_run(3) if event not in rest])
    expect(shown.locator("#summary")).to_contain_text("– to first tokens")


def test_page_shows_lanes_flows_figures_and_calls(show: Show) -> None:
    shown = show(read(RUN))
    assert shown.locator("#names b").all_inner_texts() == [
        "planner",
        "local",
        "language",
        "summary",
    ]
    assert shown.locator("#names h3").count() == 2
    assert shown.locator("rect.decode").count() == 4
    assert shown.locator("rect.waiting").count() == 4
    assert shown.locator("rect.ahead").count() > 20
    assert shown.locator("path.flow").count() > 20
    expect(shown.locator("#summary")).to_contain_text("3 of 4")
    rows = shown.locator("#calls tbody tr")
    assert rows.count() == 4
    assert rows.nth(3).locator("td").all_inner_texts()[1] == "summary"
    assert rows.nth(3).locator("td").last.inner_text() == "hit"


def test_hovering_over_a_call_or_a_prefill_shows_its_card(show: Show) -> None:
    events = read(RUN)
    usage = calls(events)[3].usage
    assert usage is not None
    shown = show(events)
    card = shown.locator("#card")
    expect(card).to_be_hidden()
    shown.locator("rect.decode").nth(3).hover()
    decode, late = f"{usage.completion_tokens} tokens in", f"{usage.late_tokens} late"
    cached = f"{usage.cached_tokens} cached ({usage.streamed_tokens} of them streamed)"
    for words in ("summary", decode, f"{cached}, {late}", "hit, from planner, local, language"):
        expect(card).to_contain_text(words)
    expect(card).not_to_contain_text("this prefill")
    shown.locator("rect.ahead").last.hover()
    expect(card).to_contain_text("this prefill")
    shown.mouse.move(5, 5)
    expect(card).to_be_hidden()


def test_arrow_keys_go_from_call_to_call(show: Show) -> None:
    shown = show(read(RUN))
    lanes, card = shown.locator("#lanes"), shown.locator("#card")
    while lanes.evaluate("node => node !== document.activeElement"):
        shown.keyboard.press("Tab")
    expect(card).to_contain_text("planner")
    shown.keyboard.press("ArrowRight")
    expect(card).to_contain_text("local")
    shown.keyboard.press("ArrowDown")
    expect(card).to_contain_text("language")
    expect(lanes).to_have_attribute("aria-activedescendant", "call-2")
    expect(shown.locator("#call-2 .ring")).to_be_attached()
    width = shown.locator("#call-2 rect.decode").bounding_box()["width"]
    shown.keyboard.press("Enter")
    wider = "([before]) => document.querySelector('#call-2 rect.decode').getBBox().width > before"
    shown.wait_for_function(wider, arg=[width])
    shown.keyboard.press("Escape")
    expect(card).to_be_hidden()


def test_the_page_can_be_zoomed_and_panned(show: Show) -> None:
    shown = show(read(RUN))
    axis = shown.locator("#axis text")
    whole = axis.all_text_contents()
    assert whole[:3] == ["0 s", "1 s", "2 s"]
    shown.get_by_label("Zoom in").click()
    expect(axis.first).not_to_have_text(whole[0])
    zoomed = axis.all_text_contents()
    lanes = shown.locator("#lanes").bounding_box()
    middle = (lanes["x"] + lanes["width"] / 2, lanes["y"] + 60)
    shown.mouse.move(*middle)
    shown.mouse.down()
    shown.mouse.move(middle[0] + 300, middle[1], steps=4)
    shown.mouse.up()
    expect(axis.first).not_to_have_text(zoomed[0])
    shown.keyboard.down("Control")
    shown.mouse.wheel(0, -400)
    shown.keyboard.up("Control")
    expect(axis.nth(1)).to_contain_text(".")
    shown.get_by_role("button", name="Whole run").click()
    expect(axis).to_have_text(whole)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_are_drawn(show: Show, scheme: str, tmp_path: Path) -> None:
    shown = show(read(RUN), color_scheme=scheme)
    ground = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is (scheme == "light")
    # The folder that keeps the screenshots.
    folder = Path(os.environ.get("FLASHMOA_SCREENSHOTS", tmp_path))
    assert len(shown.screenshot(path=folder / f"timeline-{scheme}.png")) > 20_000


def test_agents_names_and_texts_are_shown_as_text(show: Show) -> None:
    shown = show(hostile())
    assert shown.locator("#names b").all_inner_texts() == [HOSTILE, "quiet"]
    assert shown.locator("img, iframe, script:not(#run)").count() == 1
    badges = shown.locator(".badge")
    signs = {kind for badge in badges.all() if (kind := badge.get_attribute("class"))}
    assert {"badge failed", "badge declined", "badge waits", "badge upstream-failed"} <= signs
    badges.first.hover()
    expect(shown.locator("#card")).to_contain_text(HOSTILE)
    expect(shown.locator("#notes")).to_contain_text(f"failed: {HOSTILE}")
    shown.locator("rect.failed").first.hover()
    expect(shown.locator("#card")).to_contain_text("failed")


def test_two_thousand_calls_draw_only_what_is_visible(show: Show) -> None:
    shown = show(long_run(2000))
    assert len(shown.content()) < 5_000_000
    drawn = "document.querySelectorAll('#lanes *').length"
    assert shown.evaluate(drawn) < 3000
    chart = shown.locator("#chart")
    assert chart.evaluate("node => node.scrollHeight > node.clientHeight")
    assert shown.locator("#calls tbody tr").count() == 2000
    shown.locator("#calls button").nth(1000).click()
    expect(shown.locator("#call-1000 rect.decode")).to_be_visible()
    expect(shown.locator("#card")).to_contain_text("agent 6")
    assert shown.evaluate(drawn) < 3000


def test_the_page_of_an_empty_trace_has_no_errors(browser: Browser, tmp_path: Path) -> None:
    trace, file = tmp_path / "run.jsonl", tmp_path / "run.html"
    trace.write_text("")
    assert command.main([str(trace), "--html", str(file)]) == 0
    shown = browser.new_page()
    errors: list[str] = []
    shown.on("pageerror", lambda error: errors.append(str(error)))
    shown.goto(file.as_uri())
    expect(shown.locator("#when")).to_contain_text("This trace has no calls")
    expect(shown.locator("#lanes .grid").first).to_be_attached()
    shown.close()
    assert errors == []
