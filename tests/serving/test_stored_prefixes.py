"""Beginnings of prompts come back from a folder of contexts, in other engines and after a restart."""

from __future__ import annotations

import errno
import threading

import pytest
import torch

from hetero_kv import SamplingParams
from hetero_kv.contexts import writing
from hetero_kv.contexts.store import ContextStore
from hetero_kv.engine.errors import ContextError
from hetero_kv.errors import HeteroKVError
from tests.serving.tiny_engine import GREEDY, PROMPTS, alone, engine_of
from tests.support.ragged_rows import prompt
from tests.support.slow_variants import with_few

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST = PROMPTS[3]
FOLLOWING, BRANCH = [*FIRST, *PROMPTS[1]], [*FIRST[:150], *PROMPTS[7]]
ONE = SamplingParams(max_new_tokens=1)


def stored_in(folder):
    with ContextStore(folder) as contexts:
        return contexts.contexts()


def files_in(folder):
    return sorted(path.name for path in folder.glob("*.safetensors"))


def saved_first(folder, recipe="adaptive", architecture="llama", **settings):
    with engine_of(recipe, architecture, context_folder=folder, **settings) as engine:
        engine.generate(FIRST, ONE).result()


def require_only_kept(engine):
    """All blocks belong to sequences that are kept."""
    while engine._prefixes.drop_oldest():
        pass
    for allocator in engine._store.allocators.values():
        assert allocator.free_blocks == allocator.num_blocks


@pytest.mark.parametrize("recipe", with_few(["dense", "adaptive", "quest", "snapkv"], ("adaptive",)))
def test_after_a_restart_a_prompt_begins_with_what_was_stored(recipe, tmp_path):
    saved_first(tmp_path, recipe)
    with engine_of(recipe, context_folder=tmp_path) as engine:
        for tokens, cached in ((FOLLOWING, len(FIRST)), (BRANCH, 150)):
            found = engine.generate(tokens, GREEDY).result()
            assert found.cached_tokens == cached
            assert found.tokens == alone(engine, tokens)
        require_only_kept(engine)


@pytest.mark.parametrize("starts_thread", [False, True])
def test_kept_sequences_are_saved_while_another_request_is_answered(starts_thread, tmp_path):
    with engine_of("dense", context_folder=tmp_path, starts_thread=starts_thread) as engine:
        engine.generate(FIRST, ONE).result()
        stream = engine.generate(PROMPTS[1], SamplingParams(max_new_tokens=300, ignore_eos=True))
        next(iter(stream))
        engine.save_kept()
        assert len(files_in(tmp_path)) == 1
        stream.cancel()
    engine.save_kept()


def test_layers_that_cannot_go_back_find_whole_sequences_only(tmp_path):
    saved_first(tmp_path, "quest", "qwen3_5_text")
    with engine_of("quest", "qwen3_5_text", context_folder=tmp_path) as engine:
        for tokens, cached in ((FOLLOWING, len(FIRST)), (BRANCH, 0)):
            found = engine.generate(tokens, GREEDY).result()
            assert found.cached_tokens == cached
            assert found.tokens == alone(engine, tokens)


def test_a_loaded_beginning_decodes_and_passes_parts_beside_others(tmp_path):
    saved_first(tmp_path, "dense")
    with engine_of("dense", context_folder=tmp_path, longest_gap_s=1e-6) as engine:
        other = engine.generate(PROMPTS[4], SamplingParams(max_new_tokens=40, ignore_eos=True))
        while not other._pieces:
            engine.step()
        found = engine.generate(FOLLOWING, GREEDY).result()
        assert found.cached_tokens == len(FIRST)
        assert found.tokens == alone(engine, FOLLOWING)
        assert other.result().tokens == alone(engine, PROMPTS[4], 40)


def test_the_longest_of_resident_and_stored_beginnings_is_taken(tmp_path):
    saved_first(tmp_path, "dense")
    with engine_of("dense", context_folder=tmp_path) as engine:
        engine.generate(FIRST[:100], ONE).result()
        assert engine.generate(FOLLOWING, ONE).result().cached_tokens == len(FIRST)


def test_a_stored_beginning_that_is_longer_by_less_than_a_block_is_not_loaded(tmp_path):
    saved_first(tmp_path, "dense")
    with engine_of("dense", context_folder=tmp_path) as engine:
        loads = []
        load = engine._prefixes.stored.load
        engine._prefixes.stored.load = lambda *arguments: loads.append(arguments) or load(*arguments)
        engine.generate(FIRST[:196], ONE).result()
        assert len(loads) == 1
        assert engine.generate(FOLLOWING[:220], ONE).result().cached_tokens == 196
        assert len(loads) == 1


def test_a_sequence_is_written_while_nothing_else_is_to_do_and_only_where_it_has_more(tmp_path):
    engine = engine_of("dense", context_folder=tmp_path)
    answering = engine.generate(FIRST, GREEDY)
    while not answering.is_done:
        engine.step()
        assert files_in(tmp_path) == []
    engine.step()
    # What a process that is killed now leaves behind.
    (first,) = files_in(tmp_path)
    assert [stored.tokens for stored in stored_in(tmp_path)] == [len(FIRST) + 11]
    engine.generate(FIRST, ONE).result()
    engine.generate([*FIRST, *answering.result().tokens[:8], 9, 9, 9], ONE).result()
    for _ in range(4):
        engine.step()
    assert files_in(tmp_path) == [first]
    engine.generate(FOLLOWING, ONE).result()
    engine.close()
    assert len(files_in(tmp_path)) == 2
    smallest, largest = sorted(stored_in(tmp_path), key=lambda stored: stored.bytes)
    # Common blocks are stored once.
    assert (smallest.tokens, largest.file) == (len(FOLLOWING), first)


def test_a_sequence_is_written_when_it_leaves_memory(tmp_path):
    with engine_of("dense", context_folder=tmp_path, kept_prefixes=1) as engine:
        for tokens in (FIRST, PROMPTS[2], PROMPTS[6]):
            engine.generate(tokens, ONE).result()
        assert sorted(stored.tokens for stored in stored_in(tmp_path)) == [len(PROMPTS[2]), len(FIRST)]
        assert engine.generate([*FIRST, 5], ONE).result().cached_tokens == len(FIRST)


def test_a_thread_writes_what_another_one_closes(tmp_path):
    with engine_of("dense", context_folder=tmp_path, starts_thread=True) as engine:
        engine.generate(FIRST, ONE).result()
    assert [stored.tokens for stored in stored_in(tmp_path)] == [len(FIRST)]


def test_a_damaged_file_is_a_warning_and_the_prompt_is_computed(tmp_path, caplog):
    saved_first(tmp_path, "dense")
    (name,) = files_in(tmp_path)
    path = tmp_path / name
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(byte ^ 1 for byte in content[middle : middle + 64])
    path.write_bytes(content)
    with engine_of("dense", context_folder=tmp_path) as engine:
        found = engine.generate(FOLLOWING, GREEDY).result()
        assert found.cached_tokens == 0
        assert found.tokens == alone(engine, FOLLOWING)
        assert f"a stored context cannot be used, and the prompt is computed: {path}: block" in caplog.text
        require_only_kept(engine)


def test_a_sequence_of_other_weights_is_not_used(tmp_path):
    saved_first(tmp_path, "dense")
    with engine_of("dense", context_folder=tmp_path) as engine:
        with torch.no_grad():
            engine._scheduler.forward.model.model.layers[0].mlp.down_proj.weight.mul_(2)
        found = engine.generate(FOLLOWING, GREEDY).result()
        assert found.cached_tokens == 0
        assert found.tokens == alone(engine, FOLLOWING)


def test_all_files_together_stay_below_the_limit(tmp_path, caplog):
    saved_first(tmp_path, "dense")
    (stored,) = stored_in(tmp_path)
    limit = stored.bytes * 1.5 / 1e9
    with engine_of("dense", context_folder=tmp_path, context_cache_gb=limit) as engine:
        engine.generate(prompt(190, 8).tolist(), ONE).result()
    assert [each.tokens for each in stored_in(tmp_path)] == [190]
    with engine_of("dense", context_folder=tmp_path, context_cache_gb=1e-9) as engine:
        answer = engine.generate(PROMPTS[2], GREEDY).result()
        assert answer.tokens == alone(engine, PROMPTS[2])
    assert f"is not stored in {tmp_path}" in caplog.text
    assert "raise context_cache_gb" in caplog.text


def test_a_full_disk_is_a_warning(tmp_path, monkeypatch, caplog):
    with engine_of("dense", context_folder=tmp_path) as engine:
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(writing, "write_tensors", lambda *_, **__: (_ for _ in ()).throw(full))
        assert engine.generate(FIRST, GREEDY).result().tokens == alone(engine, FIRST)
        engine.step()
        assert "No space left on device); free disk space, or choose another folder" in caplog.text
        assert engine.generate(FOLLOWING, ONE).result().cached_tokens >= len(FIRST)
    assert stored_in(tmp_path) == []


def test_a_sequence_without_room_in_memory_stays_on_the_disk(tmp_path):
    saved_first(tmp_path, "dense")
    with engine_of("dense", context_folder=tmp_path, kv_tokens=160) as engine:
        tokens = [*FIRST[:110], 5, 6]
        found = engine.generate(tokens, GREEDY).result()
        assert found.cached_tokens == 0
        assert found.tokens == alone(engine, tokens)


@pytest.mark.parametrize("recipe", ["retroinfer", "infinipot"])
def test_where_a_later_prompt_is_not_computed_exactly_the_folder_is_not_used(recipe, tmp_path, caplog):
    folder = tmp_path / "contexts"
    saved_first(folder, recipe)
    assert f"context_folder {folder} is not used" in caplog.text
    assert not folder.exists()


def test_a_folder_that_cannot_be_used_and_a_limit_below_0_are_refused_by_name(tmp_path):
    file = tmp_path / "a file"
    file.write_text("not a folder")
    with pytest.raises(ContextError, match=rf"{file} cannot hold contexts .*; name another folder \(context_folder\)"):
        engine_of("dense", context_folder=file)
    with pytest.raises(HeteroKVError, match="Engine: context_cache_gb is -1; it must be at least 0"):
        engine_of("dense", context_folder=tmp_path, context_cache_gb=-1)


def test_who_asks_right_behind_an_answer_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    with engine_of(context_folder=tmp_path, starts_thread=True) as engine:
        written, write_one = threading.Event(), engine._prefixes.write_one
        monkeypatch.setattr(engine._prefixes, "write_one", lambda: (written.set(), write_one()))
        for tokens in PROMPTS[:4]:
            engine.generate(tokens, GREEDY).result()
            assert not written.is_set()
        assert written.wait(20)


def test_a_folder_that_is_gone_is_used_again_when_it_is_back(tmp_path, caplog):
    folder, elsewhere = tmp_path / "contexts", tmp_path / "elsewhere"
    saved_first(folder, "dense")
    with engine_of("dense", context_folder=folder) as engine:
        folder.rename(elsewhere)
        found = engine.generate(FOLLOWING, GREEDY).result()
        assert found.cached_tokens == 0
        assert found.tokens == alone(engine, FOLLOWING)
        engine.step()
        assert f"{folder} is gone; mount or create it" in caplog.text
        assert not folder.exists()
        failures = engine.status().context_failures
        assert failures >= 2
        while engine._prefixes.drop_oldest():
            pass
        elsewhere.rename(folder)
        # Another process has used it meanwhile.
        (folder / "index.sqlite").unlink()
        saved_first(folder, "dense")
        assert engine.generate([*FIRST, 7], ONE).result().cached_tokens == len(FIRST)
        assert engine.status().context_failures == failures


def test_a_sequence_that_another_one_has_but_for_a_few_tokens_leaves_memory_unwritten(tmp_path):
    with engine_of("dense", context_folder=tmp_path, kept_prefixes=1) as engine:
        for token in (5, 6, 7):
            assert engine.generate([*PROMPTS[3], token], ONE).result().tokens
        assert files_in(tmp_path) == []
    assert [stored.tokens for stored in stored_in(tmp_path)] == [len(PROMPTS[3]) + 1]
