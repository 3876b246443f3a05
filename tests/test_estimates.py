import math

import numpy as np
import pytest

from tokamax._src import estimates
from toy import SPACE, Estimating, Toy, ToyConfig, arrays


def bound(says=None):
    return Estimating(says=says).bind(*arrays())


def test_an_op_has_none_by_default():
    ba = Toy.bind(*arrays())
    assert estimates.of(ba, ba.autotuning_configs, "TPU v5 lite") is None
    assert estimates.ranked(ba, "TPU v5 lite") == []


def test_the_fastest_comes_first_and_ties_have_an_order():
    ranked = estimates.ranked(bound(), "any")
    assert {config for config, _ in ranked} == SPACE and [ms for _, ms in ranked] == sorted(ms for _, ms in ranked)
    assert [config for config, _ in ranked[:2]] == [ToyConfig(8), ToyConfig(8, True)]
    assert estimates.ranked(bound(), "other") == []


def test_what_should_not_be_used_comes_as_inf_or_nan():
    ba = bound((1.0, math.nan, math.inf, *[2.0] * 5))
    assert estimates.of(ba, ba.autotuning_configs, "any").tolist()[:3] == [1.0, math.inf, math.inf]
    assert len(estimates.ranked(ba, "any")) == 6


@pytest.mark.parametrize(
    ("says", "reason"), [((1.0,), "one per config"), ((0.0,) * 8, "must be positive"), ("text", "ValueError")]
)
def test_a_mistake_costs_the_estimate_and_no_more(says, reason):
    ba = bound(says)
    with pytest.warns(UserWarning, match=reason):
        assert estimates.of(ba, ba.autotuning_configs, "any") is None


def test_no_configs_have_no_times():
    np.testing.assert_array_equal(estimates.of(bound(), (), "any"), np.zeros(0))
