"""`hetero-kv chat` without a terminal prints one answer."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hetero_kv.chat.conversation import Conversation
from hetero_kv.chat.prefill_bar import PrefillBar
from hetero_kv.cli import main
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.models import load_model

QUESTION = "word1 word2 word3"


class Chat:
    """Calls `hetero-kv chat` on the tiny model."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capsys = capsys

    def __call__(self, *arguments: object, status: int = 0) -> tuple[str, str]:
        """(standard output, standard error) of a run that must end with `status`."""
        words = ["chat", "--model", str(self.folder), "--dtype", "float32", "--max_new_tokens", "8"]
        assert main([*words, *map(str, arguments)]) == status
        captured = self.capsys.readouterr()
        return captured.out, captured.err

    def json(self, *arguments: object) -> dict[str, Any]:
        """The JSON object of a run, which must be all of its standard output."""
        return json.loads(self("--json", *arguments)[0])


def retrieval_in(report: dict[str, Any]) -> dict[str, Any]:
    """The summary of the report's RetrievalAttention operators."""
    (summary,) = (entry for entry in report["settings"]["operators"] if entry["operator"] == "RetrievalAttention")
    return summary


@pytest.fixture
def chat(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> Chat:
    return Chat(tiny_model_folder, capsys)


def test_standard_output_is_the_answer_alone(chat: Chat, tiny_model_folder: Path):
    out, err = chat("--prompt", QUESTION)
    loaded = load_model(str(tiny_model_folder), dtype="float32")
    assert out == Conversation(loaded.model, loaded.tokenizer).ask(QUESTION, max_new_tokens=8).text + "\n"
    assert "8 tokens, first after" in err


def test_a_prompt_file_is_the_document_and_the_prompt_its_question(chat: Chat, tmp_path: Path, monkeypatch: Any):
    calls, ask = [], Conversation.ask

    def noted(talk: Conversation, question: str, *, document: str | None = None, **kwargs: Any) -> Any:
        calls.append((question, document))
        return ask(talk, question, document=document, **kwargs)

    monkeypatch.setattr(Conversation, "ask", noted)
    (tmp_path / "notes.txt").write_text("word4 word5\n")
    chat("--prompt_file", tmp_path / "notes.txt", "--prompt", QUESTION)
    chat("--prompt_file", tmp_path / "notes.txt")
    chat("--prompt", QUESTION)
    assert calls == [(QUESTION, "word4 word5\n"), ("word4 word5", None), (QUESTION, None)]


def test_normal_and_long_context_mode_give_the_same_answer(chat: Chat):
    long_context, normal = (chat.json("--prompt", QUESTION, "--mode", mode) for mode in ("long_context", "normal"))
    assert long_context["answer"] == normal["answer"]
    assert (long_context["mode"], normal["mode"]) == ("long_context", "normal")
    assert "RetrievalAttention" in [summary["operator"] for summary in long_context["settings"]["operators"]]
    assert normal["settings"]["operators"] == []
    assert normal["config"] is None


def test_the_json_object_holds_counts_speeds_memory_and_settings(chat: Chat):
    report = chat.json("--prompt", QUESTION, "--chunk-size", 7, "--max_seq_len", 99, "--sink_tokens", 0)
    # <begin> user (3 words) <end> <begin> assistant
    assert (report["prompt_tokens"], report["generated_tokens"], report["context_tokens"]) == (8, 8, 16)
    assert report["finish_reason"] == "max_new_tokens"
    assert report["time_to_first_token_s"] > 0
    assert report["prefill_tokens_per_s"] == pytest.approx(8 / report["prefill_s"])
    assert report["decode_tokens_per_s"] == pytest.approx(7 / report["decode_s"])
    assert report["peak_dram_bytes"] > report["kv_bytes"] > 0
    assert "peak_vram_bytes" in report
    assert report["model"] == chat.folder.name
    assert report["config"] == "injection_rules/adaptive.yaml"
    assert report["settings"]["engine"]["chunk_size"] == 7
    assert report["settings"]["engine"]["max_seq_len"] == 99
    retrieval = retrieval_in(report)
    assert retrieval["layers"] == [0, 1]
    assert retrieval["settings"]["sink_tokens"] == 0
    assert retrieval["settings"]["token_step"] == RetrievalSettings().token_step
    assert retrieval["settings"]["rerank"] == "all"
    assert report["settings"]["dtype"] == "float32"


def test_the_place_that_auto_chooses_is_told(chat: Chat):
    report = chat.json("--prompt", QUESTION, "--attend_on", "auto")
    assert report["attend_on"] == "cpu: the model computes on the CPU"
    assert report["settings"]["engine"]["attend_on"] == "cpu"


def test_the_weights_are_told_in_bytes_and_types(chat: Chat):
    report = chat.json("--prompt", QUESTION)
    model = load_model(str(chat.folder), dtype="float32").model
    assert report["weight_bytes"] == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert report["weight_types"] == "float32"
    # Of a CPU there is nothing to choose.
    assert report["attention_backend"] is None
    assert report["cuda_graphs"] is None
    assert report["attend_on"] is None
    quantized = chat.json("--prompt", QUESTION, "--weights", "q8_0")
    # The layers' rows of 48 numbers are no whole blocks.
    assert quantized["weight_types"] == "Q8_0, float32"
    assert quantized["weight_bytes"] < report["weight_bytes"]
    (linear,) = (each for each in quantized["settings"]["operators"] if each["operator"] == "QuantizedLinear")
    assert linear["layers"] == [0, 1, "lm_head"]


def test_the_command_line_wins_over_the_rules_file_which_wins_over_the_settings_file(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "settings.yaml").write_text("long_context: {sink_tokens: 8, local_windows_len: 8, top_k_blocks: 8}")
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "long_context: {sink_tokens: 16, local_windows_len: 16}\n"
        "rules: [{match: {class: LlamaDecoderLayer}, replace: {class: ChunkedDecoderLayer}},"
        " {match: {class: LlamaAttention}, replace: {class: RetrievalAttention}}]"
    )
    settings = retrieval_in(chat.json("--prompt", "word1", "--config", rules, "--sink_tokens", 32))["settings"]
    assert (settings["sink_tokens"], settings["local_windows_len"], settings["top_k_blocks"]) == (32, 16, 8)


def test_the_first_run_writes_the_settings_file(chat: Chat, tmp_path: Path):
    chat("--prompt", QUESTION, "--mode", "normal")
    assert "#block_size: 128" in (tmp_path / "settings.yaml").read_text()


def test_a_seed_repeats_a_random_answer(chat: Chat):
    first, again, other = (
        chat("--prompt", QUESTION, "--temperature", 5, "--mode", "normal", "--seed", seed)[0] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_the_system_message_is_part_of_the_prompt(chat: Chat):
    report = chat.json("--prompt", QUESTION, "--system", "word4 word5", "--mode", "normal")
    assert report["prompt_tokens"] == 8 + 5


def test_a_full_context_cuts_the_answer_and_says_so(chat: Chat):
    out, err = chat("--prompt", QUESTION, "--max_seq_len", 10)
    assert len(out.split()) == 3
    assert "the context of 10 tokens is full (--max_seq_len)" in err


def test_a_question_that_does_not_fit_is_an_error_that_names_max_seq_len(chat: Chat):
    out, err = chat("--prompt", "word1 " * 30, "--max_seq_len", 10, status=2)
    assert out == ""
    assert err.startswith("error: ")
    assert "max_seq_len" in err


def test_a_max_seq_len_beyond_the_models_context_gives_a_warning(chat: Chat, caplog: pytest.LogCaptureFixture):
    chat("--prompt", QUESTION, "--max_seq_len", 70_000)
    assert "max_seq_len: 70,000 tokens exceed the 65,536 that the model was trained for" in caplog.text


def test_more_threads_than_the_process_has_cpus_give_a_warning(
    chat: Chat, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hetero_kv.settings.engine_settings.usable_cpus", lambda: 1)
    chat("--prompt", QUESTION, "--threads_num", 500)
    assert "threads_num is 500; as many threads compute as this process may use CPUs: 1" in caplog.text
    caplog.clear()
    chat("--prompt", QUESTION, "--threads_num", 1)
    assert "threads_num" not in caplog.text


def test_stop_texts_and_sampling_reach_the_answer(chat: Chat):
    whole = chat.json("--prompt", QUESTION, "--mode", "normal")["answer"]
    word = whole.split()[2]
    report = chat.json("--prompt", QUESTION, "--mode", "normal", "--stop", word, "--temperature", 3, "--top_k", 1)
    assert report["answer"] == whole[: whole.index(word) + len(word)]
    assert report["finish_reason"] == "stop_text"
    assert report["settings"]["answer"]["top_k"] == 1


def test_flags_without_effect_in_normal_mode_are_named(chat: Chat, caplog: pytest.LogCaptureFixture):
    chat("--prompt", QUESTION, "--mode", "normal", "--block-size", 16, "--cpu_infer", 1)
    assert "--block_size: no effect in --mode normal" in caplog.text
    chat("--prompt", QUESTION, "--mode", "normal", "--config", "quest")
    assert "--config: no effect in --mode normal" in caplog.text
    assert "--cpu_infer" not in caplog.text


def test_flags_of_contexts_without_effect_on_one_answer_are_named(
    chat: Chat, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    folder = ["--prompt", QUESTION, "--context_folder", tmp_path / "contexts"]
    chat(*folder, "--context_cache_gb", 3)
    assert "--context_folder, --context_cache_gb: no effect without --context, --save_context or" in caplog.text
    caplog.clear()
    chat(*folder, "--save_context", "notes", "--context_cache_gb", 3)
    assert "no effect" not in caplog.text
    chat(*folder, "--context_cache", "read", "--context_wait_s", 1)
    assert "--context_wait_s: no effect on a folder of this machine" in caplog.text


def test_how_tokens_are_drawn_has_no_effect_where_none_is(chat: Chat, caplog: pytest.LogCaptureFixture):
    drawn = ["--prompt", QUESTION, "--top_k", 3, "--min_p", 0.1]
    chat(*drawn, "--temperature", 1)
    assert "no effect" not in caplog.text
    chat(*drawn)
    assert "--top_k, --min_p: no effect at temperature 0" in caplog.text


def test_the_cpu_threads_are_torchs_too(chat: Chat, monkeypatch: pytest.MonkeyPatch):
    threads = []
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    monkeypatch.setattr("numba.set_num_threads", threads.append)
    assert chat.json("--prompt", QUESTION, "--cpu_infer", 1)["settings"]["engine"]["threads_num"] == 1
    assert threads[:2] == [1, 1]


def test_a_mistake_in_the_rules_is_found_before_the_model_is_looked_for(chat: Chat):
    _, err = chat("--prompt", QUESTION, "--config", "ktransformer", "--model", "no-such-model", status=2)
    assert "there is no rules file 'ktransformer'; did you mean ktransformers?" in err


def test_an_unknown_model_is_an_error(chat: Chat):
    _, err = chat("--prompt", QUESTION, "--model", "smollm2-135m-instrukt", status=2)
    assert "did you mean 'smollm2-135m-instruct'?" in err


def test_a_gguf_path_alone_is_the_model(capsys: pytest.CaptureFixture[str]):
    assert main(["chat", "--prompt", QUESTION, "--gguf_path", "./nowhere.gguf"]) == 2
    assert "nowhere.gguf" in capsys.readouterr().err


def test_ctrl_c_ends_the_answer_with_status_130_and_keeps_its_tokens(chat: Chat, monkeypatch: pytest.MonkeyPatch):
    ask = Conversation.ask

    def interrupted(self: Conversation, question: str, **kwargs: Any) -> Any:
        write = kwargs.pop("on_text")
        pieces = []

        def on_text(piece: str) -> None:
            write(piece)
            pieces.append(piece)
            if len(pieces) == 1:
                os.kill(os.getpid(), signal.SIGINT)

        return ask(self, question, on_text=on_text, **kwargs)

    monkeypatch.setattr(Conversation, "ask", interrupted)
    out, err = chat("--prompt", QUESTION, "--mode", "normal", status=130)
    assert 1 <= len(out.split()) < 8
    assert "stopped" in err


def test_ctrl_c_while_the_prompt_prefills_ends_without_an_answer(chat: Chat, monkeypatch: pytest.MonkeyPatch):
    report_progress = PrefillBar.report

    def interrupted(bar: PrefillBar, *counts: int) -> None:
        report_progress(bar, *counts)
        if counts[0] == 0:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(PrefillBar, "report", interrupted)
    out, _ = chat("--json", "--prompt", QUESTION, "--chunk_size", 5, status=130)
    report = json.loads(out)
    assert (report["answer"], report["finish_reason"], report["generated_tokens"]) == ("", "stopped", 0)
    assert report["prefill_tokens_per_s"] is None


def test_an_unknown_command_is_an_error_with_the_nearest_spelling(capsys: pytest.CaptureFixture[str]):
    assert main(["chta"]) == 2
    assert "no command 'chta'; did you mean chat?" in capsys.readouterr().err


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    assert "chat" in capsys.readouterr().out


def speaking(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """Let the model's answers be this text."""
    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", lambda _, tokens, **__: said if len(tokens) else "")


def test_an_answer_cannot_command_the_terminal(chat: Chat, monkeypatch: pytest.MonkeyPatch):
    speaking(monkeypatch, "\x1b]0;title\x07fine\x9b2J\u202e \n")
    out, _ = chat("--prompt", QUESTION, "--mode", "normal")
    assert "]0;titlefine2J" in out
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*out}
    out, _ = chat("--json", "--prompt", QUESTION, "--mode", "normal")
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*out}
    assert json.loads(out)["answer"] == "\x1b]0;title\x07fine\x9b2J\u202e \n"


def test_bytes_that_are_no_text_are_an_error_and_the_error_is_printed(chat: Chat):
    _, err = chat("--prompt", os.fsdecode(b"\xff"), "--mode", "normal", status=2)
    assert err.startswith("error: --prompt is not UTF-8 text (character 0 is the byte 0xff)")
    _, err = chat("--prompt", QUESTION, "--model", os.fsdecode(b"\xff\x1b[2J"), status=2)
    assert err.startswith("error: ")
    assert "\x1b" not in err


def test_a_control_token_in_the_question_is_text(chat: Chat):
    report = chat.json("--prompt", "word1 <end> <begin> word2", "--mode", "normal")
    # A tokenizer of words makes the unknown of what stands in the angle brackets.
    assert report["prompt_tokens"] == 5 + 4
