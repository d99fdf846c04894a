"""Two runs compared sample by sample."""

from __future__ import annotations

import pytest

from hetero_kv import HeteroKVError
from hetero_kv.evals import RunOptions, compare, run
from hetero_kv.evals.bootstrap import mean_interval

pytestmark = pytest.mark.usefixtures("no_plots")

OPTIONS = RunOptions(lengths=(200,), depths=(0, 50, 100), samples=2)


def knowing(*wrong):
    """A model that answers right but for the samples whose number is among `wrong`."""
    count = iter(range(1000))

    def answer(sample):
        number = next(count)
        return ["no" if number in wrong else answers[0] for answers in sample.answers]

    return answer


def made(out, options=OPTIONS, baseline=None, **models):
    from tests.support import tiny_evaluation  # noqa: F401  its task

    run(["recite"], models, out, options, count_tokens=len, baseline=baseline)
    return out


def test_the_difference_is_paired_by_sample(tmp_path):
    a, b = made(tmp_path / "a", m=knowing(0, 1, 2)), made(tmp_path / "b", m=knowing(2, 3))
    (found,) = compare(a, b)
    assert (found.task, found.method_a, found.method_b, found.pairs, found.unpaired) == ("recite", "m", "m", 6, 0)
    assert (found.mean_a, found.mean_b) == (0.5, pytest.approx(4 / 6))
    assert found.difference == pytest.approx(1 / 6)
    assert (found.better, found.worse) == (2, 1)
    assert found.interval == mean_interval([1, 1, 0, 0, 0, -1])
    assert not found.is_certain


def test_a_run_does_not_differ_from_itself(tmp_path):
    a = made(tmp_path / "a", m=knowing(1), n=knowing(2))
    assert [(found.difference, found.interval) for found in compare(a, a)] == [(0, (0, 0))] * 2


def test_a_difference_in_every_sample_is_certain(tmp_path):
    a, b = made(tmp_path / "a", m=knowing(*range(6))), made(tmp_path / "b", m=knowing())
    (found,) = compare(a, b)
    assert found.is_certain
    assert found.interval == (1, 1)


def test_the_one_method_of_each_run_is_compared_whatever_it_is_called(tmp_path):
    a = made(tmp_path / "a", full=knowing(), m=knowing(0), baseline="full")
    b = made(tmp_path / "b", full=knowing(), n=knowing(), baseline="full")
    assert [(found.method_a, found.method_b) for found in compare(a, b)] == [("full", "full"), ("m", "n")]


def test_a_method_of_a_run_can_be_named(tmp_path):
    a = made(tmp_path / "a", full=knowing(), m=knowing(0), n=knowing(1), baseline="full")
    (found,) = compare(f"{a}:m", f"{a}:full")
    assert (found.method_a, found.method_b, found.worse) == ("m", "full", 0)
    with pytest.raises(HeteroKVError, match="has no method 'fule'; did you mean full"):
        compare(f"{a}:fule", a)


def test_samples_that_only_one_run_has_are_counted_and_left_out(tmp_path):
    a = made(tmp_path / "a", m=knowing())
    b = made(tmp_path / "b", RunOptions(lengths=(200,), depths=(0, 50), samples=3), m=knowing())
    (found,) = compare(a, b)
    assert (found.pairs, found.unpaired) == (4, 4)


def test_runs_of_different_seeds_have_different_samples(tmp_path):
    a, b = (made(tmp_path / str(s), RunOptions(lengths=(200,), seed=s), m=knowing()) for s in (0, 1))
    with pytest.raises(HeteroKVError, match=r"sample recite/200/0/0 has different prompts in the two runs.* same seed"):
        compare(a, b)


def test_runs_with_nothing_in_common_are_refused(tmp_path):
    a = made(tmp_path / "a", m=knowing())
    b = made(tmp_path / "b", RunOptions(lengths=(300,)), m=knowing())
    with pytest.raises(HeteroKVError, match="have no sample in common"):
        compare(a, b)
    many = made(tmp_path / "c", x=knowing(), y=knowing())
    with pytest.raises(HeteroKVError, match=r"has the methods m and .* has x, y; name one of each: RUN:METHOD"):
        compare(a, many)
    with pytest.raises(HeteroKVError, match=r"nowhere' holds no run: there is no run\.json"):
        compare(a, tmp_path / "nowhere")
