"""What tests do on the page, and in which browser.

Needs Chromium (Debian's package `chromium`) and Python's `playwright`; `make test-page` installs the latter.
"""

from __future__ import annotations

import json
import shutil

import pytest

playwright = pytest.importorskip(
    "playwright.sync_api", reason="the page is tested by Python's playwright: pip install playwright"
)
expect = playwright.expect
# The first answer waits for its kernels to be compiled.
expect.set_options(timeout=60_000)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
#: Marks of every test of the page.
MARKS = [
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
