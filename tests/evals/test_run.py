"""A run gives every method the same samples, writes a line per answer, and answers are the models' own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from hetero_kv import HeteroKVError, eject, inject
from hetero_kv.chat.conversation import Conversation
from hetero_kv.evals import CallableSubject, ConfiguredModel, RunOptions, config_specs, run
from hetero_kv.evals.prompt import Prompt
from hetero_kv.evals.sample import Score
from hetero_kv.evals.tasks import registry
from hetero_kv.operators import RetrievalAttention
from hetero_kv.planning.plan import Footprint
from hetero_kv.serving.speculation import sparse_draft, speculation
from tests.support.slow_variants import with_few
from tests.support.tiny_evaluation import SPARSE, tiny_loaded

pytestmark = pytest.mark.usefixtures("no_plots")

OPTIONS = RunOptions(lengths=(200, 300), depths=(50,))


@pytest.fixture(scope="module")
def loaded():
    return tiny_loaded()


@pytest.fixture(autouse=True)
def _ejected(loaded):
    yield
    assert getattr(loaded.model, "hetero_kv_injection", None) is None


def model_under(loaded, *configs, settings=SPARSE, **kwargs):
    return ConfiguredModel(loaded, config_specs(configs), settings=settings, **kwargs)


def count(text):
    return len(text)


def by_method(done):
    methods = {}
    for result in done.results:
        methods.setdefault(result.method, {})[result.sample] = result.predictions
    return methods


def test_every_method_answers_the_same_samples_and_each_answer_is_a_line(loaded, tmp_path):
    done = run(["recite"], model_under(loaded, "ktransformers", "quest:block_size=4"), tmp_path, OPTIONS)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    methods = ["full", "ktransformers", "quest:block_size=4"]
    assert [line["method"] for line in lines] == methods * 2
    assert [line["sample"] for line in lines[::3]] == ["recite/200/50/0", "recite/300/50/0"]
    assert len({line["prompt"] for line in lines[:3]}) == 1
    assert all(len(line["predictions"]) == 2 and line["expected"][0] == line["expected"][1] for line in lines)
    assert all(line["cost"]["kv_bytes"] > 0 and line["cost"]["tokens_per_s"] > 0 for line in lines)
    assert list(done.summary["tasks"]["recite"]) == methods
    assert all(what["samples"] == 2 for what in done.summary["tasks"]["recite"].values())


def test_the_baseline_answers_what_transformers_alone_generates(loaded, tmp_path):
    done = run(["recite"], model_under(loaded, "streaming"), tmp_path, OPTIONS)
    tokenizer = loaded.tokenizer
    for sample in registry.get("recite").generate(_request(OPTIONS)):
        tokens = []
        for turn, question in enumerate(sample.turns):
            end = [] if not turn or tokens[-1] == 0 else [0]
            turn_tokens = tokenizer(f"<|user|>{question}<|end|><|assistant|>")["input_ids"]
            prompt = torch.tensor([[*tokens, *end, *turn_tokens]])
            output = loaded.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=sample.max_new_tokens
            )
            tokens = output[0].tolist()
            answer = tokenizer.decode(tokens[prompt.shape[1] :], skip_special_tokens=True)
            assert by_method(done)["full"][sample.id][turn] == answer


@pytest.mark.slow
@pytest.mark.model
def test_the_baseline_of_a_real_model_scores_what_transformers_alone_scores(smollm2, tmp_path):
    options = RunOptions(lengths=(120,), depths=(50,))
    model = ConfiguredModel(smollm2, config_specs(["dense"]), settings={"kv_type": "FP32"})
    done = run(["needle"], model, tmp_path, options)
    task, scores = registry.get("needle"), []
    for sample in task.generate(_request(options, model)):
        messages = [{"role": "user", "content": sample.turns[0]}]
        inputs = smollm2.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = smollm2.model.generate(**inputs, do_sample=False, max_new_tokens=sample.max_new_tokens)
        answer = smollm2.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert by_method(done)["full"][sample.id] == by_method(done)["dense"][sample.id] == (answer,)
        scores.append(task.score(sample, [answer]).value)
    assert done.summary["tasks"]["needle"]["full"]["score"] == sum(scores) / len(scores)
    assert sum(scores) > 0


def _request(options, model=None):
    return registry.TaskRequest(
        options.lengths,
        options.depths,
        options.samples,
        options.seed,
        None,
        model.count_tokens if model else count,
        template_tokens=model.template_tokens if model else 0,
    )


@pytest.mark.parametrize(
    "recipe", with_few(["ktransformers", "kvretrieval", "quest", "streaming"], quick=["kvretrieval"])
)
def test_a_method_answers_from_the_shared_prefill_what_it_answers_in_a_conversation(loaded, tmp_path, recipe):
    model = model_under(loaded, recipe, "infllm")
    done = run(["recite"], model, tmp_path, OPTIONS)
    assert all(result.cost.shared_prefill == (result.method != "full") for result in done.results)
    inject(loaded.model, recipe, command_line={**SPARSE, "max_seq_len": 1000})
    try:
        for sample in registry.get("recite").generate(_request(OPTIONS)):
            talk = Conversation(loaded.model, loaded.tokenizer)
            answers = tuple(talk.ask(turn, max_new_tokens=sample.max_new_tokens).text for turn in sample.turns)
            assert by_method(done)[recipe][sample.id] == answers
    finally:
        eject(loaded.model)


def test_sparse_methods_answer_otherwise_than_full_attention(loaded, tmp_path):
    answers = by_method(run(["recite"], model_under(loaded, "streaming", "dense:top_k_blocks=all"), tmp_path, OPTIONS))
    assert answers["dense:top_k_blocks=all"] == answers["full"]
    assert answers["streaming"] != answers["full"]


def test_a_method_that_does_not_prefill_with_full_attention_prefills_by_itself(loaded, tmp_path, monkeypatch):
    shared = run(["recite"], model_under(loaded, "quest"), tmp_path / "shared", OPTIONS)
    monkeypatch.setattr(RetrievalAttention, "prefills_exactly", False)
    own = run(["recite"], model_under(loaded, "quest"), tmp_path / "own", OPTIONS)
    assert not any(result.cost.shared_prefill for result in own.results)
    assert by_method(own) == by_method(shared)
    assert "quest: prefilled by itself, 2 samples" in (tmp_path / "own" / "report.md").read_text()
    assert "quest: took the prefill that was recorded once" in (tmp_path / "shared" / "report.md").read_text()


# Methods that share it are compared with conversations of their own.
@pytest.mark.slow
def test_a_baseline_that_shares_the_prefill_answers_the_same(loaded, tmp_path):
    own = run(["recite"], model_under(loaded, "quest"), tmp_path / "own", OPTIONS)
    shared = run(["recite"], model_under(loaded, "quest", share_baseline=True), tmp_path / "shared", OPTIONS)
    assert all(result.cost.shared_prefill for result in shared.results)
    assert by_method(own) == by_method(shared)


def loaded_draft():
    draft = tiny_loaded()
    inject(draft.model, "dense", command_line={"max_seq_len": 512})
    return replace(draft, name="small")


@pytest.mark.parametrize("way", ["lookup", "sparse", "small"])
def test_guessed_tokens_change_no_answer_and_are_counted(loaded, tmp_path, monkeypatch, way):
    # Guess whatever the speed of the machine says about it.
    monkeypatch.setattr(speculation, "draft_lengths", lambda costs, odds, _: list(map(len, odds)))
    monkeypatch.setattr(speculation.StepCosts, "of", lambda costs, rows: 1.0)
    # Answers are short.
    monkeypatch.setattr(sparse_draft, "_FIRST_WITHOUT", 0)
    guessing = loaded_draft() if way == "small" else way
    alone = run(["recite"], model_under(loaded, "quest"), tmp_path / "alone", OPTIONS)
    guessed = run(["recite"], model_under(loaded, "quest", speculation=guessing), tmp_path / "guessed", OPTIONS)
    assert by_method(guessed) == by_method(alone)
    drafted = {result.method: result.cost.drafted_tokens for result in guessed.results}
    assert drafted["full"] == 0 < drafted["quest"]
    settings = guessed.summary["settings"]["methods"]
    assert (settings["quest"]["speculation"], settings["full"].get("speculation")) == (way, None)
    assert not any(result.cost.drafted_tokens for result in alone.results)


@pytest.mark.parametrize("way", ["off", "sparse"])
def test_mean_keys_of_sparse_guesses_are_planned(loaded, way):
    subject = model_under(loaded, "quest", speculation=way)
    with subject.prefilled("quest", Prompt(list(range(2, 40)), 60, None)) as ready:
        planned = Footprint.of(ready.model.hetero_kv_injection).memory(4096).mean_keys
    assert (planned > 0) == (way == "sparse")


def test_functions_are_measured_by_the_same_harness(loaded, tmp_path):
    def knows(sample):
        return [f"It is {answers[0]}." for answers in sample.answers]

    def forgets(sample):
        return [f"It is {sample.answers[0][0]}.", "No idea."]

    done = run(
        ["recite"], {"knows": knows, "forgets": forgets}, tmp_path, OPTIONS, count_tokens=count, baseline="knows"
    )
    scores = done.summary["tasks"]["recite"]
    assert (scores["knows"]["score"], scores["forgets"]["score"]) == (1, 0.5)
    assert scores["forgets"]["parts"] == {"first": 1, "last": 0}
    assert scores["forgets"]["difference"] == -0.5


def test_functions_and_configurations_of_a_model_stand_in_one_table(loaded, tmp_path):
    echo = CallableSubject("echo", lambda sample: list(sample.turns), attended=lambda length: length / 2)
    done = run(["recite"], [model_under(loaded, "quest"), echo], tmp_path, OPTIONS)
    assert list(done.summary["tasks"]["recite"]) == ["full", "quest", "echo"]
    assert done.summary["tasks"]["recite"]["echo"]["difference"] > 0
    assert done.summary["attended_tokens"]["echo"] == {"200": 100, "300": 150}


@pytest.mark.parametrize("answer", ["text", ["one"], [1, 2]])
def test_a_function_must_return_one_text_per_turn(tmp_path, answer):
    with pytest.raises(HeteroKVError, match=r"f answered sample recite/200/50/0 with .*; it must return .* 2 texts"):
        run(["recite"], {"f": lambda sample: answer}, tmp_path, OPTIONS, count_tokens=count)


def test_the_attended_tokens_are_those_of_the_blocks_that_a_step_takes(loaded):
    model = model_under(loaded, "ktransformers", "kvretrieval", "dense:top_k_blocks=all")
    # 8 initial, 16 local, the rest of a block that has not left Local as a whole, and 2 blocks of 8.
    assert model.attended("ktransformers", 203) == 8 + 16 + 3 + 16
    assert model.attended("ktransformers", 30) == 30
    assert model.attended("kvretrieval", 203) == pytest.approx((203 + 203 + 43) / 3)
    lowrank, bounded = "shadowkv:rank=8:outlier_chunks=2:local_chunks=2:sparse_budget=40", "tova:budget=50"
    others = model_under(loaded, lowrank, bounded, settings={"max_seq_len": 400})
    # 2 outlier chunks of 8, 40 chosen tokens, 2 local chunks and what is not a chunk yet.
    assert others.attended(lowrank, 203) == 16 + 40 + 16 + 3
    assert others.attended(lowrank, 60) == 60
    assert (others.attended(bounded, 203), others.attended(bounded, 30)) == (50, 30)
    assert model.attended("full", 203) == model.attended("dense:top_k_blocks=all", 203) == 203


def test_under_a_target_the_attended_tokens_are_the_most_that_there_may_be_and_all_of_a_short_context(loaded):
    at_most = {**SPARSE, "block_size": 8, "top_k_blocks": 4}
    model = model_under(loaded, "adaptive:max_dense_blocks=20", "adaptive:max_dense_blocks=0", settings=at_most)
    whole, chosen = model.methods[-2:]
    # 20 blocks of 8 behind 8 initial, before 16 local: up to a token less than those of 21.
    assert model.attended(whole, 8 + 16 + 8 * 21 - 1) == 8 + 16 + 8 * 21 - 1
    assert model.attended(whole, 8 + 16 + 8 * 21) == model.attended(chosen, 8 + 16 + 8 * 21) == 8 + 16 + 8 * 4
    # Four blocks at least.
    assert model.attended(chosen, 8 + 16 + 8 * 4 + 3) == 8 + 16 + 8 * 4 + 3


def test_samples_that_do_not_fit_are_left_out_for_every_method_and_counted(loaded, tmp_path, caplog):
    model = model_under(loaded, "quest", settings={**SPARSE, "max_seq_len": 300})
    done = run(["recite"], model, tmp_path, OPTIONS)
    assert [result.skipped is None for result in done.results] == [True] * 2 + [False]
    skipped = done.summary["skipped_samples"]
    assert [entry["sample"] for entry in skipped] == ["recite/300/50/0"]
    assert "max_seq_len is 300" in skipped[0]["reason"]
    assert skipped[0]["reason"] in (tmp_path / "report.md").read_text()
    assert "recite/300/50/0 is left out" in caplog.text


def test_lines_of_data_files_that_cannot_be_used_are_counted_and_the_others_run(loaded, tmp_path, caplog):
    data = tmp_path / "niah.jsonl"
    wording = "Some special magic numbers are hidden within the following text."
    lines = (
        {"input": f"{wording} It is {n}. What is it?", "outputs": [str(n)], "task": "niah_single_1"} for n in (7, 8, 9)
    )
    data.write_text("\n".join([*map(json.dumps, lines), "{broken"]) + "\n")
    done = run([], model_under(loaded, "quest"), tmp_path / "out", RunOptions(data=(data,), limit=2))
    assert [entry["line"] for entry in done.summary["skipped_lines"]["niah.jsonl"]] == [4]
    assert "line 4 is skipped: not JSON" in caplog.text
    assert [result.method for result in done.results] == ["full", "quest"] * 2
    assert "niah.jsonl, line 4: not JSON" in (tmp_path / "out" / "report.md").read_text()


def test_a_score_that_is_no_number_ends_the_run_with_its_sample_named(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(registry.get("recite"), "score", lambda sample, predictions: Score(float("nan")))
    with pytest.raises(HeteroKVError, match=r"full on sample recite/\S+: its score is nan; .*--dtype float32"):
        run(["recite"], ConfiguredModel(loaded, []), tmp_path, OPTIONS)
    assert (tmp_path / "results.jsonl").read_text() == ""


def test_a_model_is_whole_again_when_a_run_fails(loaded, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no luck")

    model = model_under(loaded, "quest")
    monkeypatch.setattr("hetero_kv.evals.configured_model.greedy", broken)
    with pytest.raises(RuntimeError, match="no luck"):
        run(["recite"], model, tmp_path, OPTIONS)
    assert getattr(loaded.model, "hetero_kv_injection", None) is None


def test_a_config_with_settings_of_its_own_wins_over_the_runs(loaded):
    model = model_under(loaded, "quest", "quest:block_size=4:top_k_blocks=1")
    blocks = {
        name: what["operators"][1]["settings"]["block_size"]
        for name, what in model.described().items()
        if name != "full"
    }
    assert blocks == {"quest": 8, "quest:block_size=4:top_k_blocks=1": 4}


def test_patterns_name_tasks(loaded):
    from hetero_kv.evals.run_request import requested_tasks

    assert set(requested_tasks(["ruler/niah_single_*", "recite"])) == {
        *(f"ruler/niah_single_{number}" for number in (1, 2, 3)),
        "recite",
    }
