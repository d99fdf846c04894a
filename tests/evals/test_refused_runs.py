"""Configurations, options and subjects that cannot run are refused before anything is done."""

from __future__ import annotations

import pytest

from hetero_kv import HeteroKVError
from hetero_kv.errors import ConfigError
from hetero_kv.evals import CallableSubject, ConfiguredModel, RunOptions, config_specs, run
from tests.support.tiny_evaluation import SPARSE, WINDOW, tiny_loaded

OPTIONS = RunOptions(lengths=(200, 300), depths=(50,))


@pytest.fixture(scope="module")
def under_quest():
    return ConfiguredModel(tiny_loaded(), config_specs(["quest"]), settings=SPARSE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["qest"], "there is no rules file 'qest'; did you mean quest?"),
        (["quest", "quest"], "two methods called 'quest'"),
        (["quest:block_siz=3"], "unknown setting 'block_siz'; did you mean block_size?"),
        (["quest:16"], "'16' is not a setting; write FILE:setting=value"),
        (["quest:block_size=0"], "block_size is 0"),
    ],
)
def test_a_mistake_in_a_config_is_named(words, message):
    with pytest.raises(ConfigError) as error:
        config_specs(words)
    assert message in str(error.value)


def test_a_config_called_full_would_be_taken_for_the_baseline(tmp_path):
    (tmp_path / "full.yaml").write_text("extends: dense.yaml\n")
    with pytest.raises(ConfigError, match="'full' is the name of the untouched model"):
        config_specs([str(tmp_path / "full.yaml")])


@pytest.mark.parametrize(
    ("tasks", "options", "message"),
    [
        (["nedle"], OPTIONS, "task 'nedle' is not known; did you mean 'needle'? Known: needle, "),
        (["ruler/x*"], OPTIONS, "task 'ruler/x*' matches none"),
        (["ruler/qa_1=nowhere.json"], OPTIONS, "there is no file 'nowhere.json'"),
        (["ruler/qa_1"], OPTIONS, "give that file, as published: --task ruler/qa_1=FILE"),
        ([f"recite={__file__}"], OPTIONS, "recite is not built from a file; those that are: ruler/qa_1, ruler/qa_2"),
        ([], OPTIONS, "nothing to run: give a task or a data file"),
        (["recite"], RunOptions(lengths=(WINDOW + 1,)), rf"lengths has {WINDOW + 1}, and max_seq_len is {WINDOW}"),
        (["perplexity"], OPTIONS, "task 'perplexity' needs a text: give --prompt_file FILE, or --haystack FILE"),
    ],
)
def test_a_run_that_cannot_start_says_why(under_quest, tmp_path, tasks, options, message):
    with pytest.raises(HeteroKVError) as error:
        run(tasks, under_quest, tmp_path / "out", options)
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_function_cannot_be_measured_from_logits(tmp_path):
    with pytest.raises(ConfigError, match="task 'fidelity' is measured from a model's logits, and 'f' only answers"):
        run(["fidelity"], {"f": lambda sample: []}, tmp_path, OPTIONS, count_tokens=len)


def test_functions_alone_need_to_be_told_how_tokens_are_counted(tmp_path):
    with pytest.raises(ConfigError, match="count_tokens is None"):
        run(["recite"], {"f": lambda sample: []}, tmp_path, OPTIONS)


def test_two_methods_of_one_name_are_refused(under_quest, tmp_path):
    with pytest.raises(ConfigError, match="there is 'quest' twice"):
        run(["recite"], [under_quest, CallableSubject("quest", lambda sample: [])], tmp_path, OPTIONS)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"samples": 0}, "samples is 0"),
        ({"limit": 0}, "limit is 0"),
        ({"lengths": (0,)}, "lengths has 0"),
        ({"depths": (101.0,)}, "depths has 101"),
        ({"depths": (50.0, 50.0)}, "depths has 50 twice"),
        ({"prefill_tokens": 1}, "prefill_tokens is 1"),
    ],
)
def test_an_option_out_of_range_is_named(wrong, message):
    with pytest.raises(ConfigError, match=message):
        RunOptions(**wrong)
