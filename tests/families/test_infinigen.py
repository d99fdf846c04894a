"""InfiniGen equals its paper's algorithm in plain torch, and reads blocks while the previous layer computes."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hetero_kv import inject
from hetero_kv.families.token_retrieval.choosers.infinigen import InfiniGen
from hetero_kv.families.token_retrieval.decode import TokenDecode
from hetero_kv.store.read_ahead import ReadAhead
from tests.support.ragged_rows import alone, prompt
from tests.support.slow_variants import with_few
from tests.support.small_recipes import new_cache, small_recipe
from tests.support.tiny_models import tiny_model
from tests.support.token_problem import BLOCK, END, FIRST, TokenProblem

pytestmark = pytest.mark.usefixtures("one_thread")


def reference(problem, guessed, queries, components, alpha, budget):
    """Sections 4.2 and 4.3, with a sink and a window that are attended to: the output, and the tokens of each head."""
    context, (rows, kv_heads, group) = problem.in_context, guessed.shape[:3]
    first = problem.keys[:, :, FIRST * BLOCK : (END - 2) * BLOCK]
    coarse = torch.empty(rows, kv_heads, group, problem.keys.shape[2])
    for row in range(rows):
        for head in range(kv_heads):
            of_head = queries[row, head * group : (head + 1) * group].flatten(0, 1)
            skewing = torch.linalg.svd(of_head, full_matrices=False).Vh.T
            sizes = (of_head @ skewing).abs().mean(dim=0) + (first[row, head] @ skewing).abs().mean(dim=0)
            part = skewing[:, sizes.topk(components).indices]
            coarse[row, head] = guessed[row, head] @ part @ (problem.keys[row, head] @ part).T * problem.dim**-0.5
    # The newest token is not there yet.
    there = coarse[..., :-1]
    near = (coarse - there.amax(dim=3, keepdim=True)).amax(dim=2).masked_fill(~context, -torch.inf) >= -alpha
    ranked = (coarse - there.logsumexp(dim=3, keepdim=True)).amax(dim=2).masked_fill(~context, -torch.inf)
    counts = near.sum(dim=2).float().mean(dim=1).round().int().clamp(1, budget)
    chosen = torch.zeros_like(ranked, dtype=torch.bool)
    for row in range(rows):
        chosen[row].scatter_(1, ranked[row].topk(int(counts[row]), dim=1).indices, True)
    scores = problem.scores.masked_fill(~(chosen | ~context)[:, :, None], -torch.inf)
    return scores.softmax(dim=3) @ problem.values, counts


class SkewedProblem(TokenProblem):
    """A problem whose first blocks close behind a prompt with these last queries."""

    def __init__(self, **settings):
        self.queries = torch.randn(2, 4, 40, 16, generator=torch.Generator().manual_seed(5))
        self.queries[..., 3:9] *= 4
        super().__init__("infinigen", **settings)

    def finalize(self):
        request, blocks = self.request, (FIRST, END - 2)
        known = self.chooser.learned(self.pool, request.table, *blocks, self.queries)
        for first, end in (blocks, (END - 2, END - 1), (END - 1, END)):
            known = self.chooser.finalize(self.pool, request.table, first, end, known)
        self.request = request._replace(known=known)


@pytest.mark.parametrize(("alpha", "budget"), with_few([(1.5, 40), (1e9, 13), (0.0, 40)], quick=2))
def test_a_step_is_that_of_the_algorithm(alpha, budget):
    problem = SkewedProblem(alpha=alpha, token_budget=budget, partial_components=6)
    guessed = problem.q + torch.randn(problem.q.shape, generator=torch.Generator().manual_seed(1))
    ahead = problem.chooser.choose(problem.request._replace(q=guessed.numpy()))
    problem.request = problem.request._replace(ahead=ahead)
    answer, out, _ = problem.answered()
    expected, tokens = reference(problem, guessed, problem.queries, 6, alpha, budget)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert answer.tokens == float(tokens.float().mean())
    assert (1 if alpha == 0 else 2) <= answer.tokens <= budget
    # Six components of the Context's keys, and whole keys around it but the newest.
    assert answer.read == (88 * 6 + 20 * 16) * 2 * 4


def test_without_queries_keys_stand_for_them():
    problem = TokenProblem("infinigen", partial_components=16, token_budget=9, alpha=1e9)
    every = TokenProblem("infinigen", partial_components=16, token_budget=9, alpha=1e9)
    known = every.request.known["basis"]
    eye = torch.eye(16).expand_as(known)
    torch.testing.assert_close(known @ known.transpose(2, 3), eye, rtol=1e-5, atol=1e-5)
    _, out, _ = problem.answered()
    ranked = (problem.scores - problem.scores[..., :-1].logsumexp(dim=3, keepdim=True)).amax(dim=2)
    ranked = ranked.masked_fill(~problem.in_context, -torch.inf)
    chosen = torch.zeros_like(ranked, dtype=torch.bool).scatter_(2, ranked.topk(9, dim=2).indices, True)
    scores = problem.scores.masked_fill(~(chosen | ~problem.in_context)[:, :, None], -torch.inf)
    torch.testing.assert_close(out, scores.softmax(dim=3) @ problem.values, rtol=1e-4, atol=1e-4)


def test_directions_that_few_queries_leave_open_are_the_principal_ones_of_the_keys():
    problem = SkewedProblem(partial_components=16)
    # Six queries of 16 channels per kv head.
    few = problem.queries[:, :, :3]
    rounded = few * (1 + 1e-6 * torch.randn(few.shape, generator=torch.Generator().manual_seed(2)))
    bases = []
    for queries in (few, rounded):
        known = problem.chooser.learned(problem.pool, problem.request.table, FIRST, END - 2, queries)
        # Components are in order; those that no query has are last.
        bases.append(known["basis"][..., 6:])
    assert (few.unflatten(1, (2, 2)).flatten(2, 3) @ bases[0]).abs().max() < 1e-3
    spread = problem.keys[:, :, FIRST * BLOCK : (END - 2) * BLOCK] @ bases[0]
    products = spread.transpose(2, 3) @ spread
    sizes = products.diagonal(dim1=2, dim2=3)
    assert (sizes.diff(dim=2) < 0).all()
    assert (products - sizes.diag_embed()).abs().max() < 1e-2 * sizes.min()
    assert (bases[0] * bases[1]).sum(dim=2).abs().min() > 0.999


@pytest.fixture
def model():
    model = tiny_model("llama", max_position_embeddings=2048)
    small = {"block_size": 4, "sink_tokens": 4, "local_windows_len": 8, "chunk_size": 512, "max_seq_len": 2048}
    inject(model, small_recipe("infinigen", **small), command_line={"token_budget": 12})
    return model


def watched(monkeypatch, kind, name, note):
    """Let `note` see the arguments of a method whenever it is called."""
    method = getattr(kind, name)

    def noting(self, *args):
        note(self, *args)
        return method(self, *args)

    monkeypatch.setattr(kind, name, noting)


def test_queries_are_guessed_from_the_input_of_the_layer_before(model, monkeypatch):
    """By the layer's own norm and projections; nothing is guessed from the input of the model's first layer."""
    layers = [layer.wrapped for layer in model.model.layers]
    for number, layer in enumerate(layers):
        layer.input_layernorm.weight.data.normal_(generator=torch.Generator().manual_seed(number))
    cache, recorded, request = new_cache(model), [], {}
    alone(model, cache, [prompt(61, 0)])
    _, second, third = (operator.wrapped for operator in model.hetero_kv_injection.attention_operators())
    second.register_forward_pre_hook(lambda module, args, kwargs: recorded.append(kwargs), with_kwargs=True)
    layers[1].input_layernorm.register_forward_pre_hook(lambda module, args: recorded.append(args[0]))
    watched(monkeypatch, InfiniGen, "choose", lambda self, each: request.update({self.layer_idx: each.q.copy()}))
    alone(model, cache, [prompt(1, 1)])
    hidden, kwargs = recorded
    assert request.keys() == {1, 2}
    for module, layer in zip((second, third), layers[1:], strict=True):
        q = module.q_proj(layer.input_layernorm(hidden)).view(1, 1, -1, module.head_dim).transpose(1, 2)
        expected, _ = apply_rotary_pos_emb(q, q, *kwargs["position_embeddings"])
        found = torch.from_numpy(request[module.layer_idx]).flatten(1, 2)
        torch.testing.assert_close(found, expected.squeeze(2))


def test_blocks_in_a_file_are_read_ahead_before_the_previous_layer_attends(model, monkeypatch, tmp_path):
    cache, said = new_cache(model), []
    # Enough tokens for the file to be mapped.
    alone(model, cache, [prompt(1201, 0)])
    cache.save(tmp_path / "context")
    loaded = new_cache(model, load=tmp_path / "context", verify=False)
    pools = [layer.pool for layer in loaded.layers]
    of_pool = {id(pool.read_ahead): number for number, pool in enumerate(pools)}
    watched(monkeypatch, ReadAhead, "request", lambda self, ids: said.append(("ask", of_pool[id(self)], ids)))
    watched(monkeypatch, TokenDecode, "_attended", lambda self, *_: said.append(("attend", self._operator.layer_idx)))
    alone(model, loaded, [prompt(1, 1)])
    # The second layer has none before it that it guesses from.
    assert [each[:2] for each in said] == [("attend", 0), ("ask", 2), ("attend", 1), ("ask", 1), ("attend", 2)]
    for number in (1, 3):
        layout, request = loaded.layers[said[number][1]].layout, set(said[number][2].ravel().tolist())
        assert request <= set(loaded.sequences[0].tables[layout].ids[1:-2])
        assert 1 <= len(request) <= 2 * 12


def test_the_chosen_tokens_are_those_that_are_attended_to(model, monkeypatch):
    """In steps that close a block as in others, whatever the true queries are."""
    cache, chosen, request = new_cache(model), [], []
    alone(model, cache, [prompt(61, 0)])
    watched(monkeypatch, InfiniGen, "choose", lambda self, call: chosen.append(call.end))
    watched(monkeypatch, InfiniGen, "attend", lambda self, call: request.append((call.end, call.ahead is not None)))
    alone(model, cache, [prompt(1, 1), 9])
    assert request == [(end, True) for end in chosen]
    assert len(request) == 10 * 2
    assert len(set(chosen)) > 2
