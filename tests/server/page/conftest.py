"""A browser, and pages in it that must not meet an error."""

from __future__ import annotations

import asyncio

import pytest

from hetero_kv.server.chat_answers import ChatAnswers


@pytest.fixture(scope="module", autouse=True)
def slow_answers():
    """Tokens come slowly enough for a hand to stop them."""
    events = ChatAnswers.events

    async def slowed(self):
        async for each in events(self):
            await asyncio.sleep(0.02)
            yield each

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatAnswers, "events", slowed)
        yield


@pytest.fixture(scope="module")
def browser():
    # Not above: where playwright is missing, the tests' files are skipped, and this one is imported all the same.
    from tests.server.page.actions import BROWSER, playwright

    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser):
    """Opens pages; at the end none of them may have met an error, a refused file or another host."""
    from tests.server.page.actions import expect

    contexts, complaints = [], []

    def open_page(address, key=None, **settings):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **settings})
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if "Content Security" in said.text else None)
        page.on("request", lambda sent: None if sent.url.startswith(address) else complaints.append(sent.url))
        page.goto(address)
        if key is not None:
            page.get_by_label("Key", exact=True).fill("a-wrong-key-of-ann")
            page.get_by_role("button", name="Use this key").click()
            expect(page.get_by_text("The server refuses this key")).to_be_visible()
            page.get_by_label("Key", exact=True).fill(key)
            page.get_by_role("button", name="Use this key").click()
        expect(page.locator("#model option")).not_to_have_count(0)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def page(opened, address):
    return opened(address)
