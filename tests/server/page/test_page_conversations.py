"""Conversations that the page keeps in the browser."""

from __future__ import annotations

from tests.server.page.actions import (
    MARKS,
    answer_with,
    ask,
    expect,
    expect_answers,
    settle,
    text_chunks,
)

pytestmark = MARKS


def test_a_reload_keeps_the_conversation(page):
    settle(page, 6)
    ask(page, "Before the reload?")
    expect_answers(page, 1)
    text = page.locator(".answer .prose").last.inner_text()
    page.reload()
    expect(page.locator(".question")).to_have_text("Before the reload?")
    assert page.locator(".answer .prose").last.inner_text() == text
    expect(page.locator("#conversations li")).to_have_count(1)
    ask(page, "And now?")
    expect_answers(page, 2)


def test_a_reload_keeps_the_model_of_the_conversation(page):
    models = [{"id": f"tiny:{recipe}", "meta": {"n_ctx": 800}} for recipe in ("dense", "adaptive")]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": models}))
    sent = answer_with(page, text_chunks("Yes."))
    page.reload()
    page.select_option("#model", "tiny:adaptive")
    ask(page, "Before the reload?")
    expect_answers(page, 1)
    page.reload()
    expect(page.locator("#model")).to_have_value("tiny:adaptive")
    ask(page, "And now?")
    expect_answers(page, 2)
    assert [body["model"] for body in sent] == ["tiny:adaptive"] * 2


def test_an_answer_that_a_reload_broke_off_says_so(page):
    ask(page)
    expect(page.locator(".answer .prose p").first).not_to_be_empty()
    page.reload()
    expect(page.locator(".note")).to_contain_text("Ask again")
    expect(page.locator(".answer")).to_have_attribute("aria-busy", "false")


def test_conversations_are_begun_renamed_deleted_and_brought_back(page):
    answer_with(page, text_chunks("Yes."))
    ask(page, "One?")
    expect_answers(page, 1)
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".message")).to_have_count(0)
    ask(page, "Two?")
    expect_answers(page, 1)
    titles = page.locator("#conversations .conversation-title")
    expect(titles).to_have_text(["Two?", "One?"])
    page.locator("#conversations li").nth(1).hover()
    page.get_by_role("button", name="Rename One?").click()
    page.keyboard.type("First")
    page.keyboard.press("Enter")
    expect(titles).to_have_text(["Two?", "First"])
    page.locator("#conversations li").first.hover()
    page.get_by_role("button", name="Delete Two?").click()
    expect(titles).to_have_text(["First"])
    page.get_by_role("button", name="Undo").click()
    expect(titles).to_have_text(["Two?", "First"])
    expect(page.locator(".question")).to_have_text("Two?")


def test_the_oldest_conversation_makes_room_and_the_page_says_so(page):
    answer_with(page, text_chunks("Yes."))
    page.evaluate(
        """() => {
            for (let number = 0; number < 60; number++) {
                const id = `old-${number}`;
                const one = { id, title: `Old ${number}`, updated: number, system: "", sampling: {}, messages: [] };
                localStorage.setItem(`hetero-kv.conversation.${id}`, JSON.stringify(one));
            }
            localStorage.setItem("hetero-kv.conversation.broken", "{");
        }"""
    )
    page.reload()
    expect(page.locator("#conversations li")).to_have_count(60)
    ask(page, "New?")
    expect(page.locator("#toasts")).to_contain_text("“Old 0”, the oldest conversation, was removed")
    expect(page.locator("#conversations li")).to_have_count(60)
    assert page.evaluate("localStorage.getItem('hetero-kv.conversation.old-0')") is None
