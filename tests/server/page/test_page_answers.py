"""Documents, questions, stops, errors and keys on the page."""

from __future__ import annotations

import re

import pytest

from tests.server.page.actions import (
    ANSWER,
    DOCUMENT,
    MARKS,
    answer_with,
    ask,
    choose,
    expect,
    expect_answers,
    settle,
    text_chunks,
)
from tests.server.running import host_of, running

pytestmark = MARKS


def test_a_document_is_uploaded_and_asked_about(page, served):
    choose(page)
    settle(page)
    ask(page, "How many lighthouses?")
    expect_answers(page, 1)
    expect(page.locator(".question")).to_contain_text("brest.txt")
    expect(page.locator(".figures")).to_contain_text("12 tokens")
    tokens = len(served.tokenizer.encode(DOCUMENT))
    expect(page.locator("#context .use-documents dd")).to_have_text(str(tokens))
    expect(page.locator("#context .use-answer dd")).to_have_text("12")
    expect(page.locator(".context-sum")).to_contain_text("of 800 tokens")
    expect(page.locator("#title")).to_have_text("How many lighthouses?")


def test_a_dropped_file_is_uploaded(page):
    page.evaluate(
        """() => {
            const data = new DataTransfer();
            data.items.add(new File(["Some text of a file."], "dropped.txt", { type: "text/plain" }));
            for (const type of ["dragenter", "dragover", "drop"]) {
                const how = { dataTransfer: data, bubbles: true, cancelable: true };
                document.body.dispatchEvent(new DragEvent(type, how));
            }
        }"""
    )
    expect(page.locator("#documents .document-name")).to_have_text("dropped.txt")
    expect(page.locator("#documents .document-size")).to_contain_text("tokens")
    expect(page.locator("#drop")).to_be_hidden()
    page.get_by_role("button", name="Remove dropped.txt").click()
    expect(page.locator("#documents li")).to_have_count(0)


def test_a_file_without_text_says_so(page):
    page.set_input_files("#file", [{"name": "x.pdf", "mimeType": "application/pdf", "buffer": b"%PDF-no"}])
    expect(page.locator("#documents .is-error")).to_contain_text("x.pdf")
    expect(page.locator("#send")).to_be_disabled()


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_an_answer_is_stopped_and_a_second_question_goes_on(page, served, way):
    choose(page)
    ask(page)
    expect(page.locator(".answer .prose p").first).not_to_be_empty()
    if way == "button":
        page.get_by_role("button", name="Stop the answer").click()
    else:
        page.keyboard.press("Escape")
    expect_answers(page, 1)
    expect(page.locator(".note")).to_have_text("Stopped.")
    expect(page.locator(".figures")).to_have_text(re.compile(r"\d+ tokens? · .*dense"))
    expect(page.locator("#send")).to_be_visible()
    settle(page, 4)
    ask(page, "And then?")
    expect_answers(page, 2)
    cached = re.search(r"(\d+) of \d+ cached", page.locator(".figures").last.inner_text())
    assert int(cached[1]) >= len(served.tokenizer.encode(DOCUMENT))
    assert not [each for each in served.engine.status().requests if each.state != "waiting"]


def test_the_whole_conversation_is_sent_with_its_settings(page):
    sent = answer_with(page, text_chunks("Three."))
    choose(page)
    page.click("#open-settings")
    page.get_by_label("System message").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_role("button", name="Save").click()
    ask(page, "First?")
    expect_answers(page, 1)
    ask(page, "Second?")
    expect_answers(page, 2)
    (system, first, answer, second), body = sent[-1]["messages"], sent[-1]
    assert system == {"role": "system", "content": "Be brief."}
    assert [part["type"] for part in first["content"]] == ["file", "text"]
    assert answer == {"role": "assistant", "content": "Three."}
    assert second["content"] == [{"type": "text", "text": "Second?"}]
    assert (body["model"], body["temperature"], "max_completion_tokens" in body) == ("tiny:dense", 0.5, False)


def test_progress_of_the_prompt_shows_the_time_left(page):
    progress = [
        {"choices": [], "prompt_progress": {"total": 4000, "cache": 0, "processed": done, "time_ms": time}}
        for done, time in ((0, 0), (1000, 10_000))
    ]
    page.evaluate(
        """chunks => {
            const body = chunks.map((chunk) => `data: ${JSON.stringify({ id: "c", ...chunk })}\\n\\n`).join("");
            const real = window.fetch;
            window.fetch = (path, options) => path !== "v1/chat/completions" ? real(path, options) : Promise.resolve(
                new Response(new ReadableStream({ start: (to) => to.enqueue(new TextEncoder().encode(body)) })));
        }""",
        progress,
    )
    ask(page)
    expect(page.locator(".progress-text")).to_have_text("Reading 1,000 of 4,000 tokens · about 30 s left")
    expect(page.locator(".prefill progress")).to_have_js_property("value", 1000)


def test_markdown_is_shown_and_foreign_markup_is_text(page):
    answer_with(page, text_chunks(ANSWER))
    ask(page)
    expect_answers(page, 1)
    prose = page.locator(".answer .content > .prose")
    expect(prose.locator("h3")).to_have_text("Result")
    expect(prose.locator("em")).to_have_text("soft")
    expect(prose.locator("strong")).to_have_text("hard")
    expect(prose.locator("ul ul li")).to_have_text("inner")
    expect(prose.locator("td.to-right")).to_have_text("1")
    expect(prose.locator("pre")).to_have_text('print("<b>not bold</b>")')
    assert prose.locator("a").evaluate_all("links => links.map((link) => link.href)") == [
        "https://example.org/a", "https://example.org/p.png",
    ]  # fmt: skip
    assert prose.locator("img, b, script").count() == 0
    assert page.evaluate("window.isHacked") is None


def test_thoughts_are_folded(page):
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "Hm."}, "finish_reason": None}]}
    answer_with(page, [thought, *text_chunks("Yes.")])
    ask(page)
    expect_answers(page, 1)
    expect(page.locator(".thoughts .prose")).not_to_be_visible()
    page.locator(".thoughts summary").click()
    expect(page.locator(".thoughts .prose")).to_have_text("Hm.")
    expect(page.locator(".content > .prose")).to_have_text("Yes.")


def test_an_answer_and_its_code_are_copied(page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer_with(page, text_chunks(ANSWER))
    ask(page)
    expect_answers(page, 1)
    for name, text in (("Copy the code", 'print("<b>not bold</b>")'), ("Copy the answer", ANSWER)):
        page.get_by_role("button", name=name).click()
        expect(page.locator("#announcer")).to_have_text("Copied.")
        assert page.evaluate("navigator.clipboard.readText()") == text


def test_an_error_in_the_middle_of_an_answer_keeps_what_was_said(page):
    answer_with(page, [*text_chunks("Half of")[:-1], {"error": {"message": "the server is out of memory"}}])
    ask(page)
    expect_answers(page, 1)
    expect(page.locator(".content > .prose")).to_have_text("Half of")
    expect(page.locator(".note.is-error")).to_have_text("the server is out of memory")


def test_a_question_is_edited_and_asked_again(page):
    sent = answer_with(page, text_chunks("Yes."))
    ask(page, "Wrong?")
    expect_answers(page, 1)
    page.locator(".question").hover()
    page.get_by_role("button", name="Edit and ask again").click()
    page.get_by_label("Edited question").fill("Right?")
    page.keyboard.press("Enter")
    expect(page.locator(".question")).to_have_text("Right?")
    expect_answers(page, 1)
    page.get_by_role("button", name="Ask again", exact=True).click()
    expect_answers(page, 1)
    assert [each["messages"][-1]["content"][0]["text"] for each in sent] == ["Wrong?", "Right?", "Right?"]


def test_a_prompt_that_is_too_long_is_said_with_both_numbers(page):
    choose(page, text="word " * 900)
    expect(page.locator(".context-sum")).to_contain_text("more than the context's 800")
    ask(page)
    expect_answers(page, 1)
    expect(page.locator(".note.is-error")).to_contain_text("tokens > 800 maximum")


def test_a_server_with_keys_is_asked_with_one(opened, served, tmp_path):
    with running(host_of(served, folder=tmp_path, keys=("ann:secret-of-ann",))) as address:
        page = opened(address, key="secret-of-ann")
        settle(page, 4)
        ask(page)
        expect_answers(page, 1)
        expect(page.locator(".figures")).to_contain_text("4 tokens")
        assert "secret-of-ann" not in page.evaluate("JSON.stringify(localStorage)")
