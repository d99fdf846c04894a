"""Draft models that are refused or off, by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_kv.errors import ConfigError
from hetero_kv.models.loading import LoadedModel
from hetero_kv.serving.speculation import opening
from tests.serving.number_tokenizer import Numbers
from tests.serving.test_draft_models import Others, draft_of, guessing
from tests.serving.tiny_engine import engine_of
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


def test_another_vocabulary_is_refused_by_both_sizes():
    with pytest.raises(ConfigError, match="has 97 tokens and the draft model's 98, of which 40 is '40' and 'forty'"):
        guessing(draft_of(tokenizer=Others()))


def test_rules_that_cannot_verify_load_no_draft_model(caplog, monkeypatch):
    monkeypatch.setattr(opening, "load_draft", lambda *arguments: pytest.fail("it was loaded"))
    with engine_of("h2o", speculation="./small.gguf") as engine:
        assert engine.speculation == "off"
    assert "speculation is off: model.layers.0.self_attn (BoundedAttention)" in caplog.text


def test_a_draft_model_that_cannot_take_tokens_back_is_off(caplog):
    with guessing(draft_of("qwen3_5_text")) as engine:
        assert engine.speculation == "off"
    assert "speculation is off: the draft model small: " in caplog.text


def test_a_draft_model_that_is_not_there_or_has_no_rules_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="a draft model that cannot be loaded: there is no GGUF file"):
        engine_of(speculation=str(tmp_path / "small.gguf"))
    with pytest.raises(ConfigError, match="the draft model small has no rules injected"):
        engine_of(speculation=LoadedModel(tiny_model("llama"), Numbers(), "small", 512))
    with pytest.raises(ConfigError, match="called 'auto', which is a way"):
        engine_of(speculation=replace(draft_of(), name="auto"))
