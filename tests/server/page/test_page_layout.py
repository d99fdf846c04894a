"""The page on phones, in both colour schemes and by keyboard."""

from __future__ import annotations

import re

import pytest

from tests.server.page.actions import (
    ANSWER,
    MARKS,
    answer_with,
    attended,
    choose,
    expect,
    expect_answers,
    text_chunks,
)

pytestmark = MARKS


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_cut_off(opened, address, scheme):
    page = opened(address, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True, color_scheme=scheme)
    answer_with(page, text_chunks(ANSWER + "a_very_long_word_" * 40))
    attended(page)
    choose(page, name="a-rather-long-name-of-a-document-that-does-not-fit-on-a-phone.txt")
    page.fill("#question", "Where?")
    page.get_by_role("button", name="Send").tap()
    expect_answers(page, 1)
    page.get_by_role("button", name="What did it look at?").tap()
    page.locator(".token").first.tap()
    expect(page.locator("#attention .bin")).to_have_count(4)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator("#thread").evaluate("element => element.scrollWidth <= element.clientWidth")
    page.get_by_role("button", name="Conversations").tap()
    expect(page.locator("#new-conversation")).to_be_in_viewport()
    page.keyboard.press("Escape")
    expect(page.locator("#new-conversation")).not_to_be_in_viewport()


def test_colours_follow_the_system_until_one_is_chosen(opened, address):
    def lightness(page):
        colour = page.evaluate("getComputedStyle(document.querySelector('.main')).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3

    page = opened(address, color_scheme="dark")
    assert lightness(page) < 60
    page.get_by_text("Light", exact=True).click()
    assert lightness(page) > 200
    page.reload()
    assert lightness(page) > 200
    assert lightness(opened(address, color_scheme="light")) > 200


def test_the_keyboard_reaches_everything_in_a_sensible_order(page):
    name = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent.trim()"
    names = []
    page.locator(".skip").focus()
    for _ in range(7):
        names.append(page.evaluate(name))
        page.keyboard.press("Tab")
    assert names[:2] == ["Skip to the question", "New conversation"]
    assert names[-3:] == ["Settings of this conversation", "Add a document", "Question"]
