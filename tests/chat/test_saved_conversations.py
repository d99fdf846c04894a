"""Conversations continue in another process: from a file, a name, a prompt's prefix, the command line."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import astuple
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hetero_kv import Conversation, HeteroKVError, inject
from hetero_kv.chat.answer import Turn
from hetero_kv.chat.commands import run_command
from hetero_kv.cli import main
from hetero_kv.contexts.folder import open_store
from hetero_kv.contexts.prefix_cache import PrefixCache
from hetero_kv.contexts.settings import ContextSettings
from hetero_kv.contexts.store import ContextStore
from hetero_kv.engine.errors import ContextError
from tests.support.small_recipes import small_recipe

pytestmark = pytest.mark.usefixtures("one_thread")

DOCUMENT = " ".join(f"word{number % 90}" for number in range(300))
FEW = {"max_new_tokens": 5}


@pytest.fixture(scope="module", params=["ktransformers", "streaming_llm"])
def recipe(request):
    return request.param


@pytest.fixture(scope="module")
def loaded(recipe, tiny_model_folder):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder).eval().requires_grad_(False)
    inject(model, small_recipe(recipe, block_size=4, chunk_size=64, sink_tokens=8))
    return model, AutoTokenizer.from_pretrained(tiny_model_folder)


@pytest.fixture
def store(tmp_path):
    with ContextStore(tmp_path / "contexts") as store:
        yield store


def begun(loaded, **settings):
    talk = Conversation(*loaded, **settings)
    talk.ask("word1 word2", document=DOCUMENT, **FEW)
    return talk


def replies(talk, *questions):
    return [talk.ask(question, **FEW).text for question in questions]


def test_a_conversation_goes_on_from_a_file_as_if_nothing_had_been(loaded, tmp_path):
    talk = begun(loaded, system="word7")
    talk.save(tmp_path / "talk")
    other = Conversation(*loaded)
    other.load(tmp_path / "talk")
    assert (other.turns, other.system, other.context_tokens) == (talk.turns, "word7", talk.context_tokens)
    expected = replies(talk, "word3", "word4 word5")
    fork = other.fork()
    assert replies(other, "word3", "word4 word5") == expected
    assert replies(fork, "word3", "word4 word5") == expected


def test_a_conversation_that_cannot_be_loaded_is_as_it_was(loaded, store):
    talk = begun(loaded)
    before, expected = talk.fork(), talk.context_tokens
    with pytest.raises(ContextError, match="no context 'other'"):
        talk.load_from(store, "other")
    assert talk.context_tokens == expected
    assert replies(talk, "word3") == replies(before, "word3")


def test_a_failed_save_says_why(loaded, store, tiny_model_folder):
    with pytest.raises(ContextError, match="the conversation is empty"):
        Conversation(*loaded).save_in(store, "nothing")
    untouched = Conversation(AutoModelForCausalLM.from_pretrained(tiny_model_folder), loaded[1])
    untouched.ask("word1", **FEW)
    with pytest.raises(ContextError, match="cannot be saved; inject rules, or start the chat without --mode normal"):
        untouched.save_in(store, "untouched")
    talk = begun(loaded)
    with pytest.raises(HeteroKVError, match="save the conversation before or after"):
        talk.ask("word3", on_text=lambda text: talk.save_in(store, "half"), **FEW)


def test_an_untouched_model_continues_no_saved_conversation(loaded, store, tiny_model_folder):
    begun(loaded).save_in(store, "talk")
    untouched = Conversation(AutoModelForCausalLM.from_pretrained(tiny_model_folder), loaded[1])
    with pytest.raises(ContextError, match="the model has no rules, so it cannot continue a saved context; inject"):
        untouched.load_from(store, "talk")


def test_a_context_of_a_cache_is_one_turn(loaded, tmp_path):
    model, tokenizer = loaded
    talk = begun(loaded)
    tokens = talk.cache.lengths[0]
    talk.cache.save(tmp_path / "cache", [list(range(3, 3 + tokens))])
    other = Conversation(model, tokenizer)
    other.load(tmp_path / "cache")
    assert other.turns == (Turn(tokens, 0),)


def test_a_first_prompt_reuses_the_stored_prefix(loaded, recipe, store):
    prefixes = PrefixCache(store, writes=True)
    first = Conversation(*loaded, prefix_cache=prefixes)
    cost = first.ask("word1", document=DOCUMENT, **FEW).statistics.prompt_tokens
    assert [each.name for each in store.contexts()] == [None]
    other = Conversation(*loaded, prefix_cache=PrefixCache(store, writes=False))
    answer = other.ask("word2 word3", document=DOCUMENT, **FEW)
    alone = Conversation(*loaded).ask("word2 word3", document=DOCUMENT, **FEW)
    assert answer.text == alone.text
    # Entries that were dropped do not come back: there a context serves what begins with all of it.
    goes_back = recipe == "ktransformers"
    assert (answer.statistics.prompt_tokens < 0.3 * cost) == goes_back
    assert len(store.contexts()) == 1
    replies(other, "word5")
    other.reset()
    assert other.ask("word2 word3", document=DOCUMENT, **FEW).text == alone.text


def test_a_stopped_or_refused_first_question_leaves_an_empty_conversation(loaded, store):
    begun(loaded, prefix_cache=PrefixCache(store, writes=True))
    talk = Conversation(*loaded, prefix_cache=PrefixCache(store, writes=False))
    stopped = talk.ask("word2 word3", document=DOCUMENT, should_stop=lambda: True, **FEW)
    assert stopped.finish_reason == "stopped"
    assert talk.ask("word9", **FEW).text == Conversation(*loaded).ask("word9", **FEW).text


def test_a_store_that_fails_costs_a_warning_and_no_answer(loaded, tmp_path, caplog):
    with ContextStore(tmp_path / "full", limit=10) as store:
        begun(loaded, prefix_cache=PrefixCache(store, writes=True))
    assert "the context cannot be stored: the context takes" in caplog.text


@pytest.fixture
def chat(tiny_model_folder, tmp_path, capsys):
    """Runs the chat command with these flags; returns its exit status, and its JSON if the flags contain `--json`."""
    document = tmp_path / "document.txt"
    document.write_text(DOCUMENT)

    def run(*flags, document_too=True):
        prompt = ["--prompt_file", str(document)] if document_too else []
        common = ["--model", str(tiny_model_folder), "--config", "quest", "--max_seq_len", "4096", "--block_size", "8"]
        status = main(
            ["chat", *common, "--max_new_tokens", "3", "--context_folder", str(tmp_path / "c"), *prompt, *flags]
        )
        seen = capsys.readouterr()
        return status, json.loads(seen.out) if "--json" in flags and not status else seen.err

    return run


def test_a_context_is_saved_and_gone_on_from_on_the_command_line(chat, tmp_path, capsys):
    status, whole = chat("--prompt", "word1", "--save_context", "notes", "--json")
    assert status == 0
    status, short = chat("--prompt", "word2", "--context", "notes", "--json", document_too=False)
    assert status == 0
    assert short["prompt_tokens"] < 10 < 300 < whole["prompt_tokens"]
    assert short["context_tokens"] > whole["context_tokens"]
    folder = ["--context_folder", str(tmp_path / "c")]
    assert main(["contexts", "list", "--json", *folder]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["contexts"]] == ["notes"]
    assert main(["contexts", "show", "notes", *folder]) == 0
    shown = capsys.readouterr().out
    assert "operators: RetrievalAttention\n" in shown
    assert re.search(r"bytes: \d+,\d{3}\n", shown)
    assert re.search(r"created: \d{4}-\d\d-\d\d \d\d:\d\d\n", shown)
    assert main(["contexts", "verify", *folder]) == 0
    assert "notes: intact" in capsys.readouterr().out
    assert main(["contexts", "remove", "notes", *folder]) == 0
    assert main(["contexts", "prune", *folder]) == 0
    assert "removed 0 contexts" in capsys.readouterr().out


def test_commands_about_contexts_create_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hetero_kv.contexts.folder.cache_home", lambda: tmp_path / "home")
    (tmp_path / "empty").mkdir()
    for where, flags in (("home", []), ("empty", ["--context_folder", str(tmp_path / "empty")])):
        for action in ("list", "verify", "prune"):
            assert main(["contexts", action, *flags]) == 0
            said = " ".join(capsys.readouterr().out.split())
            assert action != "list" or re.search(rf"there are no contexts in \S*{where}", said)
        assert main(["contexts", "show", "notes", *flags]) == 2
        assert "there is no context 'notes'" in " ".join(capsys.readouterr().err.split())
    assert [*tmp_path.rglob("*")] == [tmp_path / "empty"]


def test_mistakes_about_contexts_are_reported_before_a_model_loads(chat, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hetero_kv.chat.session.open_model", lambda *_, **__: pytest.fail("the model was opened"))
    (tmp_path / "file").touch()
    folder = ["--context_folder", str(tmp_path / "c")]
    assert main(["contexts", "list", *folder]) == 2
    assert f"there is no folder {tmp_path / 'c'}" in " ".join(capsys.readouterr().err.split())
    assert chat("--prompt", "word1", "--context", "lost")[0] == 2
    # Reading creates no folder.
    assert not (tmp_path / "c").exists()
    ContextStore(tmp_path / "c").close()
    for flags, said in (
        (("--context", "lost"), "there is no context 'lost'"),
        (("--save_context", "notes", "--context_folder", str(tmp_path / "file")), "cannot hold contexts"),
        (("--mode", "normal", "--context", "notes"), "--context has no effect in --mode normal"),
        (("--mode", "normal", "--context_cache", "on"), "--context_cache has no effect in --mode normal"),
        (("--save_context", " "), "is not a name for a context"),
        (("--context_cache", "maybe"), "context_cache"),
    ):
        status, error = chat("--prompt", "word1", *flags)
        assert status == 2
        assert said in error
    for words, said in (
        ([], "contexts needs an action: list, show, remove, verify, prune"),
        (["lost"], "contexts has no action 'lost'; did you mean list?"),
        (["remove"], "contexts remove needs a name"),
        (["list", "notes"], "contexts list takes no names"),
        (["show", "notes"], "there is no context 'notes'"),
    ):
        assert main(["contexts", *words, *folder]) == 2
        assert said in capsys.readouterr().err


def test_an_answer_is_printed_though_its_context_cannot_be_saved(chat, monkeypatch, capsys):
    def full(*_):
        raise ContextError("the disk is full")

    monkeypatch.setattr("hetero_kv.chat.context_commands.saved", full)
    printed = []
    monkeypatch.setattr("hetero_kv.printing.json_text", lambda report: printed.append(report) or "{}")
    status, error = chat("--prompt", "word1", "--save_context", "notes", "--json", document_too=False)
    assert (status, len(printed)) == (2, 1)
    assert "the disk is full" in error


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_context_is_saved_though_nobody_reads_the_answer(chat, flags, monkeypatch):
    """As behind `| head -c 5`; without a context to save it ends at once."""
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patched, suppress(BrokenPipeError), os.fdopen(writer, "w") as unread:
        patched.setattr("sys.stdout", unread)
        assert chat("--prompt", "word1", "--max_new_tokens", "9", "--save_context", "notes", *flags)[0] == 1
    status, more = chat("--prompt", "word2", "--context", "notes", "--json", document_too=False)
    assert status == 0
    assert more["prompt_tokens"] < 10 < 300 < more["context_tokens"]


def test_a_context_is_saved_though_standard_error_is_not_read_either(chat, monkeypatch):
    """As behind `2>&1 | head -c 5`."""
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patched, suppress(BrokenPipeError), os.fdopen(writer, "w") as unread:
        patched.setattr("sys.stdout", unread)
        patched.setattr("sys.stderr", unread)
        # rich ends a program whose output nobody reads.
        with suppress(SystemExit):
            chat("--prompt", "word1", "--save_context", "notes")
    assert chat("--prompt", "word2", "--context", "notes", "--json", document_too=False)[0] == 0


def test_a_context_is_saved_though_the_answer_cannot_be_written(chat, monkeypatch):
    with monkeypatch.context() as patched, open("/dev/full", "w") as full:
        patched.setattr("sys.stdout", full)
        status, error = chat("--prompt", "word1", "--save_context", "notes")
    assert status == 2
    assert "standard output cannot be written" in error
    assert chat("--prompt", "word2", "--context", "notes", "--json", document_too=False)[0] == 0


def test_a_context_of_other_rules_is_refused_before_the_weights_are_loaded(chat, monkeypatch):
    assert chat("--prompt", "word1", "--save_context", "notes")[0] == 0
    load = "hetero_kv.models.loading.OpenedModel.load"
    monkeypatch.setattr(load, lambda self: pytest.fail("the weights were loaded"))
    for flags, said in (
        (("--block_size", "16"), r"was saved under other settings: .*block_size.*; inject rules with those settings"),
        (("--dtype", "float16"), r"was saved with another dtype, \w+; here it is float16: load the model with dtype"),
    ):
        status, error = chat("--prompt", "word2", "--context", "notes", *flags, document_too=False)
        assert status == 2
        assert re.search(rf"the context 'notes' \([^)]*\.safetensors\) {said}", " ".join(error.split()))


def test_damage_is_named_by_verify_with_a_status_of_its_own(chat, tmp_path, capsys):
    chat("--prompt", "word1", "--save_context", "notes")
    (path,) = (tmp_path / "c").glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)
    assert main(["contexts", "verify", "notes", "--context_folder", str(tmp_path / "c")]) == 1
    assert "is damaged" in capsys.readouterr().out


def test_commands_of_the_chat_save_load_and_list(loaded, tmp_path):
    talk, notes = begun(loaded), []
    options = SimpleNamespace(contexts=ContextSettings(context_folder=str(tmp_path / "c")))
    session = SimpleNamespace(conversation=talk, contexts=lambda: open_store(options.contexts))
    terminal = SimpleNamespace(session=session, note=notes.append, forget=lambda: notes.append("forgotten"))
    terminal.note_waiting = lambda: notes.append("waiting documents")
    terminal.console = SimpleNamespace(print=lambda table: notes.append([*table.columns[1].cells]))
    run_command(terminal, "/contexts")
    run_command(terminal, "/save my notes")
    saved = talk.context_tokens
    expected = replies(talk.fork(), "word3")
    talk.reset()
    run_command(terminal, "/load my notes")
    run_command(terminal, "/contexts")
    assert replies(talk, "word3") == expected
    assert notes[0].startswith("there are no contexts in ")
    # Both report the same number: an answer's last token counts, though the next turn computes it.
    assert notes[1].startswith(f"saved my notes: {saved:,} tokens, ")
    turn = f"my notes: {sum(astuple(talk.turns[0])):,} tokens, 1 turn"
    assert notes[2:6] == ["forgotten", turn, "waiting documents", [f"{saved:,}"]]
    with pytest.raises(HeteroKVError, match="/save needs a name"):
        run_command(terminal, "/save")
    run_command(terminal, "/save my notes")
    assert notes[6].endswith(f" MB on disk; it replaces one of {saved:,} tokens with this name")
