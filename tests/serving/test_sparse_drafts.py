"""Guesses of the model itself, by attention to few blocks: they change no token, and leave nothing in the cache."""

from __future__ import annotations

import itertools

import pytest
import torch

from hetero_kv import HeteroCache, SamplingParams
from hetero_kv.engine.draft_blocks import DraftBlocks
from hetero_kv.families.retrieval import draft_attention
from hetero_kv.serving.answer_tokens import AnswerTokens
from hetero_kv.serving.sampler import Sampler
from hetero_kv.serving.speculation.speculation import Speculation
from tests.serving.test_speculation import prefilled
from tests.serving.tiny_engine import PROMPTS, engine_of
from tests.support.slow_variants import with_few

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = PROMPTS[3]
SAMPLED = SamplingParams(temperature=1.0, seed=3, frequency_penalty=0.5)


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    """Guesses attend to few of some 200 tokens."""
    monkeypatch.setattr(draft_attention, "NEWEST", 8)
    monkeypatch.setattr(draft_attention, "CHOSEN", 16)


def cover(monkeypatch):
    monkeypatch.setattr(draft_attention, "CHOSEN", 400)


def interrupt(_):
    raise KeyboardInterrupt


class Always(Speculation):
    """Guesses a number of tokens at each step, whatever that costs."""

    def __init__(self, forward, most=4):
        super().__init__(forward, "sparse")
        assert self.in_effect() == "sparse"
        self._most = most

    def drafts(self, drafters, caches, left):
        return self._guesses(drafters, caches, [min(self._most, each - 1) for each in left], left)


def answered(forward, cache, logits, tokens, params, speculation=None, count=30):
    sampler = Sampler(params, tokens, 97)
    with AnswerTokens(forward, cache, sampler, tokens, logits, speculation, limit=count) as answer:
        found = [choice.token for choice in itertools.islice(answer, count)]
    return found, answer.counts


#: Recipes that guess, and the architecture of a model.
GUESSING = (
    ("dense", "llama"), ("dense", "gemma3_text"), ("ktransformers", "llama"), ("quest", "gpt_oss"), ("quest", "llama"),
    ("adaptive", "llama"), ("infllm", "llama"), ("snapkv", "llama"), ("dense", "deepseek_v3"),
)  # fmt: skip


@pytest.mark.parametrize(("recipe", "architecture"), with_few(GUESSING, [GUESSING[0], GUESSING[3]]))
@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_guesses_change_no_token(recipe, architecture, params):
    with engine_of(recipe, architecture) as engine:
        forward, cache, logits = prefilled(engine, PROMPT)
        fork = cache.fork()
        expected, _ = answered(forward, cache, logits, PROMPT, params)
        found, counts = answered(forward, fork, logits, PROMPT, params, Always(forward))
        assert found == expected
        assert counts.drafted > 20
        assert fork.get_seq_length() == len(PROMPT) + 29
        # A fork of it goes on as the other one does.
        following = [int(forward.decode([each], [found[-1]])[0].argmax()) for each in (cache, fork.fork())]
        assert following[0] == following[1]


def test_guesses_that_attend_to_everything_are_right(monkeypatch):
    cover(monkeypatch)
    with engine_of("dense") as engine:
        forward, cache, logits = prefilled(engine, PROMPT)
        _, counts = answered(forward, cache, logits, PROMPT, SamplingParams(), Always(forward))
    assert counts.accepted == counts.drafted > 20


@pytest.mark.parametrize("recipe", ["dense", "ktransformers", "adaptive"])
def test_guessing_leaves_nothing(recipe):
    with engine_of(recipe) as engine:
        forward, cache, _ = prefilled(engine, PROMPT)
        _, other, _ = prefilled(engine, PROMPT)

        def state():
            group = cache.groups[0]
            free = [allocator.free_blocks for allocator in group.store.allocators.values()]
            return cache.get_seq_length(), dict(group.finalized), free, cache.statistics, cache.attention_mask.tolist()

        before, few = state(), DraftBlocks()
        with forward.guessing([cache]):
            for token in range(20):
                forward.guess([cache], [token], [few])
            assert cache.get_seq_length() == len(PROMPT) + 20
        assert str(state()) == str(before)
        with pytest.raises(KeyboardInterrupt), forward.guessing([cache]):
            interrupt(forward.guess([cache], [5], [few]))
        assert str(state()) == str(before)
        for token in range(3, 15):
            mine, expected = (forward.decode([each], [token]) for each in (cache, other))
            assert torch.equal(mine, expected)


def test_several_sequences_guess_together_as_each_does_alone():
    with engine_of("dense") as engine:
        made = [prefilled(engine, tokens) for tokens in PROMPTS[1:4]]
        forward, caches = made[0][0], [cache for _, cache, _ in made]
        tokens = [3, 4, 5]
        with forward.guessing(caches):
            together = [forward.guess(caches, tokens, few) for few in [[DraftBlocks() for _ in caches]] for _ in "ab"]
        for index, cache in enumerate(caches):
            few = DraftBlocks()
            with forward.guessing([cache]):
                for step in range(2):
                    alone = forward.guess([cache], [tokens[index]], [few])[0]
                    assert torch.allclose(alone, together[step][index], atol=1e-5)


@pytest.mark.parametrize("of_block", [1, 2])
def test_the_blocks_with_the_best_mean_keys_are_chosen_and_kept_for_a_draft(of_block, monkeypatch):
    monkeypatch.setattr(draft_attention, "SPAN", 8 // of_block)
    with engine_of("dense") as engine:
        forward, cache, _ = prefilled(engine, PROMPT)
        layer, few = cache.groups[0].layers[1], DraftBlocks()
        with forward.guessing([cache]):
            forward.guess([cache], [3], [few])
            first = few.chosen[1]
            forward.guess([cache], [90], [few])
            assert few.chosen[1] is first
        keys, _ = layer.pool.read(layer.block_ids(0), 0, len(PROMPT))
        # 200 tokens are 25 blocks of 8; one is the attention sink, and one is among the newest.
        means = keys[:, :192].unflatten(1, (24 * of_block, -1)).mean(dim=2)
        assert torch.allclose(few.means[1], means, atol=1e-6)
        assert (first.positions.shape, first.first, first.end) == ((1, 2, 2), 1, 24)
        q = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(0)) * 3
        step = type("Step", (), {"length": 201, "past": 200})()
        few.choose_anew()
        found = draft_attention._chosen(layer, step, few, q, 0.25)
        for head in range(2):
            shares = (q[head] @ means[head, of_block:].T * 0.25).softmax(dim=1).sum(dim=0)
            shares = shares.unflatten(0, (-1, of_block)).sum(dim=1)
            best = sorted((1 + shares.topk(2).indices).tolist())
            assert (1 + found.positions[0, head]).tolist() == best
            assert found.ids(torch.arange(26).numpy())[head].tolist() == [0, *best, 24, 25]


def test_a_saved_context_guesses_on(tmp_path):
    with engine_of("dense") as engine:
        forward, cache, logits = prefilled(engine, PROMPT)
        expected, _ = answered(forward, cache.fork(), logits, PROMPT, SamplingParams())
        found, _ = answered(forward, cache, logits, PROMPT, SamplingParams(), Always(forward), count=11)
        cache.save(tmp_path / "context")
        loaded = HeteroCache.load(tmp_path / "context", forward.model)
        following = forward.decode([loaded], [found[-1]])[0]
        tokens = [*PROMPT, *found]
        rest, counts = answered(forward, loaded, following, tokens, SamplingParams(), Always(forward), count=19)
        assert [*found, *rest] == expected
        assert counts.drafted > 10


def test_a_guess_that_fails_ends_guessing_and_no_answer(monkeypatch, caplog):
    with engine_of("dense") as engine:
        forward, cache, logits = prefilled(engine, PROMPT)
        expected, _ = answered(forward, cache.fork(), logits, PROMPT, SamplingParams())
        guess, calls = forward.guess, []

        def failing(*arguments):
            calls.append(1)
            if len(calls) == 6:
                raise MemoryError("no room")
            return guess(*arguments)

        monkeypatch.setattr(forward, "guess", failing)
        found, counts = answered(forward, cache, logits, PROMPT, SamplingParams(), Always(forward))
    assert found == expected
    assert (len(calls), counts.drafted) == (6, 4)
    assert ["no room" in line for line in caplog.messages] == [True]


def test_a_request_guesses_and_reports_it():
    with engine_of("dense", speculation="lookup") as engine:
        params = SamplingParams(max_new_tokens=30, ignore_eos=True, stop=(" 0 0 0 ",))
        expected = engine.generate(PROMPT, params, speculation="off").result().tokens
        assert engine.generate(PROMPT, params, speculation="sparse").result().tokens == expected
        always = Always(engine._scheduler.forward)
        engine._speculation = engine._scheduler._speculation = engine._inputs._speculation = always
        streams = [engine.generate(tokens, params) for tokens in (PROMPT, PROMPTS[1])]
        found = streams[0].result()
        assert found.tokens == expected
        assert found.drafted_tokens > 10
        assert engine.status().dram_bytes > 0


@pytest.mark.parametrize(("recipe", "named"), [("sparq", "TokenRetrievalAttention"), ("h2o", "BoundedAttention")])
def test_rules_that_cannot_guess_so_are_named(recipe, named, caplog):
    with engine_of(recipe, speculation="sparse") as engine:
        assert engine.speculation == "off"
        assert named in engine._scheduler.forward.why_no_sparse_drafts
        found = engine.generate(PROMPTS[1], SamplingParams(max_new_tokens=4, ignore_eos=True)).result()
        assert (len(found.tokens), found.drafted_tokens) == (4, 0)
    assert [named in line for line in caplog.messages] == [True]
