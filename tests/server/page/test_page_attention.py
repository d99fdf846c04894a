"""What an answer's words looked at, on the page."""

from __future__ import annotations

import pytest

from tests.server.page.actions import (
    DOCUMENT,
    MARKS,
    answer_with,
    ask,
    attended,
    choose,
    expect,
    expect_answers,
    settle,
    text_chunks,
)

pytestmark = MARKS


def test_what_a_word_looked_at_is_found_by_keyboard_alone(page):
    answer_with(page, text_chunks("Three of them stand there.", step=6))
    sent = attended(page)
    page.keyboard.type("How many?")
    page.keyboard.press("Enter")
    expect_answers(page, 1)
    page.get_by_role("button", name="What did it look at?").focus()
    for key in ("Enter", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    panel = page.locator("#attention")
    expect(panel.locator(".bin")).to_have_count(4)
    expect(page.locator('.token[aria-pressed="true"]')).to_be_in_viewport()
    assert sent == [{"response_id": "chatcmpl-1", "token": 1, "bins": 200}]
    # Behind the first bin, which has the attention sink.
    expect(panel.locator(".passage blockquote")).to_have_text("passage 2 <i>")
    expect(panel.locator(".passage-figures")).to_contain_text("30 % of the attention · tokens 20 to 29")
    expect(panel.locator(".strip-labels")).to_contain_text("40 %")
    panel.locator(".strip").focus()
    page.keyboard.press("ArrowRight")
    expect(panel.locator(".passage blockquote")).to_have_text("passage 3 <i>")
    panel.get_by_label("Attention of").select_option("layer 7")
    expect(panel.locator(".passage-figures")).to_contain_text("40 % of the attention · tokens 30 to 39, in the answer")
    panel.get_by_role("button", name="Layer by layer").press("Enter")
    expect(panel.locator("canvas")).to_be_visible()
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()


def test_the_strip_shows_what_the_engine_says(page):
    choose(page)
    settle(page)
    ask(page)
    expect_answers(page, 1)
    page.get_by_role("button", name="What did it look at?").click()
    with page.expect_response("**/v1/attended") as response:
        page.locator(".token").last.click()
    found = response.value.json()
    bins = found["bins"]
    assert sum(each["share"] for each in bins) + found["estimated"] + found["sinks"] == pytest.approx(1, abs=1e-3)
    assert DOCUMENT.strip() in "".join(each["text"] for each in bins)
    panel = page.locator("#attention")
    expect(panel.locator(".bin")).to_have_count(len(bins))
    strongest = max(bins[1:], key=lambda each: each["share"])
    expect(panel.locator(".passage-figures")).to_contain_text(f"tokens {strongest['first']} to {strongest['last']}")
    expect(panel.locator(".passage blockquote")).to_have_text(strongest["text"])


def test_pointing_at_the_strip_shows_a_passage(page):
    answer_with(page, text_chunks("Three of them."))
    attended(page)
    ask(page)
    page.get_by_role("button", name="What did it look at?").click()
    page.locator(".token").first.click()
    panel = page.locator("#attention")
    panel.locator(".bin").nth(1).hover()
    expect(panel.locator(".passage blockquote")).to_have_text("passage 1 <i>")
    page.locator("#title").hover()
    expect(panel.locator(".passage blockquote")).to_have_text("passage 2 <i>")


def test_an_answer_that_the_server_has_forgotten_is_said_kindly(page):
    answer_with(page, text_chunks("Three of them."))
    page.route("**/v1/attended", lambda route: route.fulfill(status=404, json={"error": {"message": "unknown"}}))
    ask(page)
    page.get_by_role("button", name="What did it look at?").click()
    page.locator(".token").first.click()
    expect(page.locator("#attention .note")).to_contain_text("does not know this answer any more")
