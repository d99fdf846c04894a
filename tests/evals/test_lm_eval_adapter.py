"""The model `hetero_kv` of lm_eval: under a covering budget its log-likelihoods are those of teacher forcing."""

from __future__ import annotations

import json
import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from hetero_kv import inject
from hetero_kv.cli import main
from hetero_kv.errors import ConfigError, HeteroKVError
from hetero_kv.evals import lm_eval_adapter
from hetero_kv.evals.lm_eval_adapter import HarnessModel, ModelArguments, lm_class, register
from hetero_kv.evals.lm_eval_adapter.generation_arguments import sampling_params
from hetero_kv.models.loading import LoadedModel
from tests.support import tiny_tokenizers
from tests.support.slow_variants import with_few
from tests.support.small_recipes import small_recipe
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 320
MAX_SEQ_LEN = 160
#: Settings under which the small recipes leave nothing out.
COVERING = {"dense": {}, "quest": {"top_k_blocks": 500, "dense_layer_num": 0}}
SPARSE = {"top_k_blocks": 1, "dense_layer_num": 0}
LONG = "A sentence of some length, which several blocks of keys hold, and which a small budget leaves out in part. "
#: Contexts of several lengths, white space between the two, several choices, no context, no common beginning.
PAIRS = [
    (LONG, "yes"),
    (LONG, "no"),
    (LONG, "maybe hello"),
    ("hello  ", "hello"),
    ("", " hello user"),
    ("", "<|im_start|>hello"),
    ("Question: what? \n\n", "Answer"),
    ("hello", " hello"),
]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizers.byte_level(add_prefix_space=False)


@pytest.fixture(scope="module")
def untouched():
    return tiny_model("llama", vocab_size=VOCAB)


def harness_of(tokenizer, recipe="dense", settings=None, **arguments):
    model = tiny_model("llama", vocab_size=VOCAB)
    inject(model, small_recipe(recipe, max_seq_len=MAX_SEQ_LEN), command_line=settings or {})
    return HarnessModel(LoadedModel(model, tokenizer, "tiny/llama", 512), ModelArguments(**{"batch": 3, **arguments}))


def forced(model, context, continuation):
    """A continuation's log-probabilities [tokens] behind a context by one forward, and whether each is the largest."""
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *continuation[:-1]]])).logits[0, len(context) - 1 :]
    logprobs = logits.double().log_softmax(dim=-1)
    return logprobs[range(len(continuation)), continuation], logits.argmax(dim=-1).tolist() == list(continuation)


def split(tokenizer, context, continuation):
    """The tokens of a context and of its continuation, as lm_eval's own model `hf` splits them."""
    if not context:
        tokens = tokenizer.encode(continuation, add_special_tokens=False)
        prefix = [tokenizer.bos_token_id]
        return (prefix, tokens[1:]) if tokens[:1] == prefix else (prefix, tokens)
    before = tokenizer.encode(context.rstrip())
    return before, tokenizer.encode(context + continuation)[len(before) :]


@pytest.mark.parametrize("recipe", with_few(COVERING, ("quest",)))
@pytest.mark.parametrize("decoded_context", with_few([0, 3], quick=[3]))
def test_a_log_likelihood_under_a_covering_budget_is_that_of_teacher_forcing(
    tokenizer, untouched, recipe, decoded_context
):
    harness = harness_of(tokenizer, recipe, COVERING[recipe], decoded_context=decoded_context)
    found = list(harness.loglikelihoods(PAIRS))
    expected = [forced(untouched, *split(tokenizer, *pair)) for pair in PAIRS]
    assert [each.logprob for each in found] == pytest.approx([float(each.sum()) for each, _ in expected], abs=1e-4)
    assert [each.is_greedy for each in found] == [is_greedy for _, is_greedy in expected]


def test_of_all_next_letters_the_likeliest_is_greedy_and_one_request_computes_them(tokenizer, untouched, monkeypatch):
    harness, submitted = harness_of(tokenizer), []
    generate = harness.engine.generate
    monkeypatch.setattr(harness.engine, "generate", lambda *given: submitted.append(given) or generate(*given))
    letters = [chr(code) for code in range(33, 127)]
    tokens = [tokenizer.encode(letter)[0] for letter in letters]
    contexts = [f"hello {number}" for number in range(22, 28)]
    found = list(harness.loglikelihoods((context, letter) for context in contexts for letter in letters))
    expected, are_greedy = [], []
    for context in contexts:
        with torch.no_grad():
            logprobs = untouched(torch.tensor([tokenizer.encode(context)])).logits[0, -1].log_softmax(dim=-1)
        expected += logprobs[tokens].tolist()
        are_greedy += [token == int(logprobs.argmax()) for token in tokens]
    assert [each.logprob for each in found] == pytest.approx(expected, abs=1e-4)
    assert [each.is_greedy for each in found] == are_greedy
    assert any(each.is_greedy for each in found)
    assert len(submitted) == len(contexts)


def test_the_first_token_comes_out_of_the_prompt_unless_the_context_is_decoded(tokenizer, untouched):
    pairs = [(LONG.rstrip(), letter) for letter in "abc"] + [(LONG.rstrip(), " hello user of this")]
    full = [float(forced(untouched, *split(tokenizer, *pair))[0].sum()) for pair in pairs]
    off = {}
    for decoded in (0, 1):
        found = harness_of(tokenizer, "quest", SPARSE, decoded_context=decoded).loglikelihoods(pairs)
        off[decoded] = [abs(each.logprob - expected) for each, expected in zip(found, full, strict=True)]
    assert max(off[0][:3]) < 1e-4
    assert min(off[0][3], *off[1]) > 1e-3


def test_a_request_that_does_not_fit_is_refused_with_both_numbers_or_cut_where_truncation_says_so(
    tokenizer, untouched, caplog
):
    pairs = [("hello", " user"), ("x" * 170 + LONG, "yes")]
    context, continuation = split(tokenizer, *pairs[1])
    stored = len(context) + len(continuation) - 1
    with pytest.raises(
        HeteroKVError, match=f"1 of 2 requests do not fit.* {stored} are stored, and max_seq_len is 160"
    ):
        harness_of(tokenizer).loglikelihoods(pairs)
    with caplog.at_level(logging.WARNING):
        found = list(harness_of(tokenizer, truncation="left").loglikelihoods(pairs))
    assert f"1 of 2 contexts lose their first tokens, up to {stored - MAX_SEQ_LEN}" in caplog.text
    kept = context[stored - MAX_SEQ_LEN :]
    expected = float(forced(untouched, kept, continuation)[0].sum())
    assert found[1].logprob == pytest.approx(expected, abs=1e-4)
    with pytest.raises(HeteroKVError, match=r"set max_seq_len to at least \d+$"):
        harness_of(tokenizer, truncation="left").loglikelihoods([("hello", "x" * 170)])


def test_a_continuation_without_tokens_is_refused(tokenizer):
    with pytest.raises(HeteroKVError, match="the continuation '' has no token of its own"):
        harness_of(tokenizer).loglikelihoods([("hello", "")])


def test_a_rolling_log_likelihood_counts_every_token_once_behind_as_much_as_fits(tokenizer, untouched):
    texts = ["hello user", "x" * 70 + LONG + "y" * 200, ""]
    found = list(harness_of(tokenizer).rolling_loglikelihoods(texts))
    long = tokenizer.encode(texts[1])
    third = len(long) - 2 * MAX_SEQ_LEN
    windows = [
        ([tokenizer.bos_token_id], long[:MAX_SEQ_LEN]),
        ([long[MAX_SEQ_LEN - 1]], long[MAX_SEQ_LEN : 2 * MAX_SEQ_LEN]),
        (long[-MAX_SEQ_LEN - 1 : 2 * MAX_SEQ_LEN], long[-third:]),
    ]
    expected = [
        float(forced(untouched, [tokenizer.bos_token_id], tokenizer.encode(texts[0]))[0].sum()),
        sum(float(forced(untouched, *window)[0].sum()) for window in windows),
        0.0,
    ]
    assert 0 < third < MAX_SEQ_LEN
    assert found == pytest.approx(expected, abs=1e-3)


def test_answers_are_those_of_the_engine_and_end_before_the_stop_texts(tokenizer):
    harness = harness_of(tokenizer)
    contexts = ["hello", LONG, "", "<|im_start|>user"]
    arguments = {"until": [], "max_gen_toks": 20, "do_sample": False}
    whole = list(harness.answers([(context, arguments) for context in contexts]))
    prompts = [tokenizer.encode(contexts[0]), tokenizer.encode(LONG), [tokenizer.bos_token_id]]
    prompts.append(tokenizer.encode(contexts[3], add_special_tokens=False))
    for prompt, text in zip(prompts, whole, strict=True):
        params = sampling_params(arguments, 9, {})
        assert harness.engine.generate(prompt, params).result().text == text
    stop = whole[1][3:5]
    (ended,) = harness.answers([(LONG, {**arguments, "until": stop})])
    assert ended == whole[1][: whole[1].index(stop)]
    with pytest.raises(
        HeteroKVError, match=r"1 of 1 requests do not fit.*an answer of max_gen_toks.*max_seq_len is 160"
    ):
        harness.answers([(LONG, {"max_gen_toks": 100})])


def test_drawn_answers_follow_from_torchs_seed(tokenizer):
    harness = harness_of(tokenizer)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(list(harness.answers([("hello", {"temperature": 1.0, "max_gen_toks": 9})] * 2)))
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]


def test_a_chat_is_rendered_as_transformers_renders_it(tokenizer):
    harness = harness_of(tokenizer)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello {{ user }} <b>"}]
    assert harness.chat_text(messages) == tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    begun = [*messages, {"role": "assistant", "content": "The answer is"}]
    assert harness.chat_text(begun, add_generation_prompt=False) == tokenizer.apply_chat_template(
        begun, tokenize=False, continue_final_message=True
    )


def test_a_template_that_refuses_system_messages_gets_none_and_a_warning(caplog):
    tokenizer = tiny_tokenizers.byte_level(add_prefix_space=False)
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + tiny_tokenizers.TEMPLATE
    )
    harness = harness_of(tokenizer)
    user = {"role": "user", "content": "hello"}
    assert harness.chat_text([{"role": "system", "content": "Be brief."}, user]) == harness.chat_text([user])
    assert "system messages are left out" in caplog.text
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="the model tiny/llama has no chat template"):
        harness.chat_text([user])
    assert harness.chat_template() == ""


def test_stored_requests_of_another_template_have_another_name(tokenizer):
    name = harness_of(tokenizer).tokenizer_name()
    other = tiny_tokenizers.byte_level(add_prefix_space=False)
    other.chat_template += " "
    assert name.startswith("tiny__llama-")
    assert harness_of(other).tokenizer_name() != name == harness_of(tokenizer).tokenizer_name()


def test_a_text_without_context_needs_a_token_before_it():
    tokenizer = tiny_tokenizers.byte_level(add_prefix_space=False)
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="name a token: prefix_token_id in model_args"):
        harness_of(tokenizer).loglikelihoods([("", "hello")])
    assert len(list(harness_of(tokenizer, prefix_token_id=5).loglikelihoods([("", "hello")]))) == 1
    with pytest.raises(ConfigError, match=f"prefix_token_id is {VOCAB}; the model has tokens 0 to {VOCAB - 1}"):
        harness_of(tokenizer, prefix_token_id=VOCAB)


def test_the_command_passes_its_words_on_unchanged(monkeypatch):
    seen = []
    command = SimpleNamespace(cli_evaluate=lambda: seen.append(sys.argv))
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(__main__=command))
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", command)
    monkeypatch.setattr(lm_eval_adapter, "register", lambda: seen.append("registered"))
    before = sys.argv
    assert main(["lm_eval", "run", "--model-args", "a=b", "--help"]) == 0
    assert seen == ["registered", ["lm_eval", "run", "--model-args", "a=b", "--help"]]
    assert sys.argv is before


def test_without_lm_eval_the_command_says_how_to_install_it(monkeypatch, capsys):
    # Not the class that another test has made where it is installed.
    monkeypatch.setattr(f"{lm_eval_adapter.__name__}.lm.lm_class", lm_class.__wrapped__)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["lm_eval", "--tasks", "arc_easy"]) == 2
    assert "pip install lm-eval" in capsys.readouterr().err


def test_lm_eval_runs_a_task_of_each_kind(tokenizer, untouched, monkeypatch, tmp_path):
    pytest.importorskip("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    register()
    register()
    assert get_model("hetero_kv") is lm_class()
    assert get_model("dummy") is not None
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        HarnessModel, "load", classmethod(lambda cls, arguments: harness_of(tokenizer, batch=arguments.batch))
    )
    data = tmp_path / "data.json"
    data.write_text("\n".join(json.dumps({"q": f"hello {number}", "c": ["user", "x"]}) for number in range(3)))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
    tasks = [
        {
            **common,
            "task": "choice",
            "output_type": "multiple_choice",
            "doc_to_choice": "{{c}}",
            "doc_to_target": 0,
            "metric_list": [{"metric": "acc"}],
        },
        {
            **common,
            "task": "answer",
            "output_type": "generate_until",
            "doc_to_target": "{{c[0]}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 5},
            "metric_list": [{"metric": "exact_match"}],
        },
        {
            **common,
            "task": "rolling",
            "output_type": "loglikelihood_rolling",
            "doc_to_target": "{{q}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
    ]
    results = simple_evaluate(
        "hetero_kv",
        model_args={"batch": 2},
        device="cuda:0",
        batch_size=1,
        tasks=tasks,
        task_manager=TaskManager(),
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    sample = results["samples"]["choice"][0]
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello 0"}], tokenize=False, add_generation_prompt=True
    )
    context = tokenizer.encode(shown.rstrip(), add_special_tokens=False)
    whole = tokenizer.encode(shown + "user", add_special_tokens=False)
    expected = float(forced(untouched, context, whole[len(context) :])[0].sum())
    assert float(sample["resps"][0][0][0]) == pytest.approx(expected, abs=1e-4)
    assert len(results["samples"]["answer"]) == len(results["samples"]["rolling"]) == 3
    assert results["config"]["max_seq_len"] == MAX_SEQ_LEN
    assert results["config"]["batch"] == 2
