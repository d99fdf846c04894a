"""Haystacks: sentences, lengths, files and needle positions."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.haystack import NOISE, Haystack, insert, position_at, sentences_of

ESSAY = 'What I learned came late. Dr. Smith was right! He asked: "Why?" So I wrote it down.\n\nThat was in 1995.'


def test_sentences_end_at_their_punctuation_and_not_at_titles():
    assert sentences_of(ESSAY) == [
        "What I learned came late.",
        "Dr. Smith was right!",
        'He asked: "Why?"',
        "So I wrote it down.",
        "That was in 1995.",
    ]


@given(st.text(alphabet="aB1 .!?\"')\n", max_size=60))
def test_sentences_keep_every_word_in_order(text):
    assert " ".join(sentences_of(text)).split() == text.split()


def test_noise_is_rulers_five_sentences_again_and_again():
    taken = Haystack.noise().take(12)
    assert " ".join(taken[:5]) == " ".join(taken[5:10]) == NOISE
    assert taken[10:] == ["The grass is green.", "The sky is blue."]


@given(st.integers(min_value=0, max_value=100))
def test_a_text_is_cut_at_the_word_and_begins_again_where_it_ends(count):
    taken = Haystack(ESSAY, "essay").take(count)
    endless = ESSAY.split() * 10
    words = " ".join(taken).split()
    assert words[:-1] == endless[:count][:-1]
    assert len(words) == count
    assert not words or words[-1].rstrip(".") == endless[count - 1].rstrip(".,:;")


def test_a_cut_sentence_ends_as_sentences_do():
    assert Haystack("One, two, three.", "essay").take(5) == ["One, two, three.", "One, two."]


def test_depth_is_a_share_of_the_characters():
    sentences = ["short.", "a sentence that is as long as nine of the others.", "short."]
    assert position_at(sentences, 0) == 0
    assert position_at(sentences, 5) == 0
    assert position_at(sentences, 50) in (1, 2)
    assert position_at(sentences, 100) == 3
    assert position_at([], 50) == 0


@given(st.lists(st.text("ab ", min_size=1, max_size=30), max_size=30), st.floats(min_value=0, max_value=100))
def test_no_sentence_boundary_is_nearer_to_the_depth(sentences, depth):
    starts = [sum(len(s) + 1 for s in sentences[:i]) for i in range(len(sentences) + 1)]
    expected = depth / 100 * starts[-1]
    found = abs(starts[position_at(sentences, depth)] - expected)
    assert found == pytest.approx(min(abs(start - expected) for start in starts))


@pytest.mark.parametrize("depth", [-1, 100.5])
def test_a_depth_outside_the_text_is_refused(depth):
    with pytest.raises(HeteroKVError, match="give 0 to 100"):
        position_at(["one."], depth)


@given(st.integers(0, 6), st.lists(st.integers(0, 6), max_size=5))
def test_needles_stand_before_the_sentence_at_their_position_and_nothing_is_lost(count, positions):
    sentences = [f"s{i}" for i in range(count)]
    positions = [min(position, count) for position in positions]
    needles = [f"n{i}" for i in range(len(positions))]
    placed = insert(sentences, needles, positions)
    assert [one for one in placed if one.startswith("s")] == sentences
    for needle, position in zip(needles, positions, strict=True):
        before = [one for one in placed[: placed.index(needle)] if one.startswith("s")]
        assert len(before) == position
    same_place = [n for n, p in zip(needles, positions, strict=True) if p == 0]
    assert [one for one in placed if one in same_place] == same_place


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("essay.txt", ESSAY),
        ("essay.json", json.dumps({"text": ESSAY})),
        ("essay.jsonl", json.dumps({"text": ESSAY})),
    ],
)
def test_a_haystack_is_read_from_text_and_json_gzipped_or_not(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
    for path in (tmp_path / name, tmp_path / f"{name}.gz"):
        haystack = Haystack.from_file(path)
        assert haystack.sentences == tuple(sentences_of(ESSAY))
        assert haystack.name == path.name


def test_a_directorys_texts_are_joined_in_order_of_their_names(tmp_path):
    (tmp_path / "b.txt").write_text("Second.")
    (tmp_path / "a.txt").write_text("First.")
    (tmp_path / "c.md").write_text("Not this.")
    assert Haystack.from_file(tmp_path).sentences == ("First.", "Second.")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "cannot be read"),
        ("empty.txt", b" \n", "holds no text"),
        ("latin.txt", b"\xff caf\xe9", "not UTF-8"),
        ("broken.json", b'{"text": ', "not JSON"),
        ("list.json", b'["text"]', "without a 'text' field"),
        ("other.json", b'{"content": "a"}', "without a 'text' field"),
        ("broken.txt.gz", b"not gzip", "cannot be read"),
    ],
)
def test_a_file_that_is_no_haystack_is_named_with_the_reason(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(HeteroKVError, match=message) as error:
        Haystack.from_file(path)
    assert name in str(error.value)


def test_a_directory_without_texts_is_named(tmp_path):
    with pytest.raises(HeteroKVError, match=r"no \.txt file"):
        Haystack.from_file(tmp_path)
