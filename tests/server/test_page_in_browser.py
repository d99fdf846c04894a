"""The page in a browser: documents, questions, stops, what an answer looked at, keys, phones and colours.

Needs Chromium (Debian's package `chromium`) and Python's `playwright`; `make test-page` installs the latter.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil

import pytest

from hetero_kv.server.chat_answers import ChatAnswers
from tests.server.running import host_of, running

playwright = pytest.importorskip(
    "playwright.sync_api", reason="the page is tested by Python's playwright: pip install playwright"
)
expect = playwright.expect
# The first answer waits for its kernels to be compiled.
expect.set_options(timeout=60_000)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(BROWSER is None, reason="the page is tested in Chromium: apt-get install chromium"),
]
DOCUMENT = "The harbour of Brest has three lighthouses. " * 5
ANSWER = """# Result

Some *soft* and **hard** words, `code`, a [link](https://example.org/a) and <img src=x onerror="window.isHacked=1">.

- one
  - inner
- [bad](javascript:window.isHacked=1) ![picture](https://example.org/p.png)

| name | value |
|------|------:|
| a    | 1     |

```python
print("<b>not bold</b>")
```
"""


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
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser):
    """Opens pages; at the end none of them may have met an error, a refused file or another host."""
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


def choose(page, name="brest.txt", text=DOCUMENT):
    page.set_input_files("#file", [{"name": name, "mimeType": "text/plain", "buffer": text.encode()}])
    expect(page.locator("#documents .document-size")).to_contain_text("tokens")


def settle(page, longest=12):
    """Sets the length of answers."""
    page.click("#open-settings")
    page.get_by_label("Longest answer").fill(str(longest))
    page.get_by_role("button", name="Save").click()


def ask(page, text="Where?"):
    page.fill("#question", text)
    page.press("#question", "Enter")


def expect_answers(page, number):
    expect(page.locator(".answer")).to_have_count(number)
    expect(page.locator('.answer[aria-busy="false"]')).to_have_count(number)


def answer_with(page, chunks):
    """Answers to questions come from here; returns the requests' bodies."""
    sent = []

    def fulfil(route):
        sent.append(json.loads(route.request.post_data))
        events = [{"id": "chatcmpl-1", **chunk} for chunk in chunks]
        body = "".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", fulfil)
    return sent


def text_chunks(text, step=7):
    pieces = [text[at : at + step] for at in range(0, len(text), step)]
    chunks = [
        {"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}], "token_index": number}
        for number, piece in enumerate(pieces)
    ]
    return [*chunks, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]


def attended(page):
    """What answers looked at comes from here; returns the requests' bodies."""
    sent = []
    shares = [0.4, 0.05, 0.3, 0.15]
    bins = [
        {"first": 10 * at, "last": 10 * at + 9, "share": share, "chosen": 0.5, "text": f"passage {at} <i>"}
        for at, share in enumerate(shares)
    ]
    found = {
        "token": "x", "prompt_tokens": 30, "bins": bins, "layers": [shares, shares[::-1]], "layer_numbers": [3, 7],
        "estimated": 0.1, "sinks": 0.0,
    }  # fmt: skip

    def fulfil(route):
        sent.append(json.loads(route.request.post_data))
        route.fulfill(json=found)

    page.route("**/v1/attended", fulfil)
    return sent


def test_a_document_is_uploaded_and_asked_about(page, served):
    choose(page)
    settle(page)
    ask(page, "How many lighthouses?")
    expect_answers(page, 1)
    expect(page.locator(".question")).to_contain_text("brest.txt")
    expect(page.locator(".figures")).to_contain_text("12 tokens")
    tokens = len(served.loaded.tokenizer.encode(DOCUMENT))
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
    assert int(cached[1]) >= len(served.loaded.tokenizer.encode(DOCUMENT))
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
    expect(page.locator(".note.is-error")).to_contain_text("takes 800 here")


def test_a_server_with_keys_is_asked_with_one(opened, served, tmp_path):
    with running(host_of(served, folder=tmp_path, keys=("ann:secret-of-ann",))) as address:
        page = opened(address, key="secret-of-ann")
        settle(page, 4)
        ask(page)
        expect_answers(page, 1)
        expect(page.locator(".figures")).to_contain_text("4 tokens")
        assert "secret-of-ann" not in page.evaluate("JSON.stringify(localStorage)")


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
