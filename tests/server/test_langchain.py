"""LangChain's client of OpenAI's API gets the engine's own tokens, calls and values.

LANGCHAIN_PYTHON=PYTHON python -m pytest -m slow tests/server/test_langchain.py
"""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from hetero_kv import SamplingParams
from tests.server.running import host_of, running, tiny_served
from tests.support import tool_templates

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

PROGRAM = """
import json, sys, typing
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

class Weather(BaseModel):
    "Asks for the weather."
    city: typing.Literal["Rome", "Oslo"]

def model(**fields):
    return ChatOpenAI(
        base_url=sys.argv[1], api_key="none", model="tiny", temperature=0, max_retries=0,
        **{"max_tokens": 200, **fields},
    )

found = {
    "whole": model(max_tokens=12).invoke("hello").content,
    "streamed": "".join(chunk.content for chunk in model(max_tokens=12).stream("hello")),
    "response": model(max_tokens=12, use_responses_api=True).invoke("hello").text,
    "calls": model().bind_tools([Weather], tool_choice="Weather").invoke("weather?").tool_calls,
    "schema": model().with_structured_output(Weather, method="json_schema").invoke("weather?").city,
}
print(json.dumps(found))
"""


@pytest.mark.skipif("LANGCHAIN_PYTHON" not in os.environ, reason="`make test-agents` installs langchain-openai")
def test_langchain_gets_the_engines_tokens_calls_and_values(tmp_path):
    served = tiny_served()
    served.tokenizer.chat_template = tool_templates.HERMES
    with served.engine, running(host_of(served, folder=tmp_path)) as address:
        command = [os.environ["LANGCHAIN_PYTHON"], "-c", PROGRAM, f"{address}/v1"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        prompt = served.engine.encode([{"role": "user", "content": "hello"}])
        expected = served.engine.generate(prompt, SamplingParams(max_new_tokens=12)).result().text
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert [found["whole"], found["streamed"], found["response"]] == [expected] * 3
    (call,) = found["calls"]
    assert call["name"] == "Weather"
    assert {call["args"]["city"], found["schema"]} <= {"Rome", "Oslo"}
