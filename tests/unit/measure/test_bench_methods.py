"""Which configurations a benchmark measures."""

import pytest

from forerun.core.errors import ConfigError
from forerun.measure.methods import labels, method_configs, runnable, with_trees
from refusals import refused


def test_method_configs_are_every_combination_and_check_their_keys():
    configs = method_configs(["none", "ngram", "random"], ["coupled", "token"], ["fixed"], [2, 4], {"max_order": 3})
    assert configs[0] == {"method": "none"}
    assert len(configs) == 1 + 2 * 2 * 2
    assert all(("max_order" in config) == (config["method"] == "ngram") for config in configs)
    refused(ConfigError, "'nonsense'", method_configs, ["ngram"], ["coupled"], ["fixed"], [], {"nonsense": 1})


def test_plain_decoding_can_be_measured_against_itself():
    configs = method_configs(["none", "ngram", "none"], ["coupled"], ["fixed"], [], {})
    assert [config["method"] for config in configs] == ["none", "none", "ngram"]


def test_options_of_one_method_do_not_reach_another():
    shared = {"ngram": {"max_order": 3, "num_speculative_tokens": 2}, "num_speculative_tokens": 5}
    configs = method_configs(["ngram", "random"], ["coupled"], ["fixed"], [], shared)
    assert [config.get("num_speculative_tokens") for config in configs] == [None, 2, 5]
    assert [config.get("max_order") for config in configs] == [None, 3, None]
    for wrong in (3, [], [3]):
        with pytest.raises(ConfigError, match="options of 'ngram'"):
            method_configs(["ngram"], ["coupled"], ["fixed"], [], {"ngram": wrong})


def test_a_method_can_be_measured_in_several_ways():
    several = [{}, {"max_order": 3}, {"max_order": 3, "num_speculative_tokens": 2}]
    configs = method_configs(["ngram", "random"], ["coupled"], ["fixed"], [], {"ngram": several})
    assert [config.get("max_order") for config in configs] == [None, None, 3, 3, None]
    assert labels(configs) == ["none", "ngram", "ngram max_order=3", "ngram max_order=3", "random"]
    both = method_configs(["ngram"], ["coupled"], ["fixed", "adaptive"], [2], {})
    assert labels(with_trees(both, 0)) == ["none", "ngram", "ngram"]


def test_each_way_that_cannot_run_is_reported(llm):
    wrong = [{"max_order": 0}, {}, {"max_order": 1, "num_speculative_tokens": 2}]
    configs = method_configs(["all"], ["coupled"], ["fixed"], [], {"ngram": wrong})
    kept, left_out = runnable(llm(), [config for config in configs if config["method"] == "ngram"])
    assert [config.get("max_order") for config in kept] == [None]
    told = {name: reason for name, reason in left_out.items() if "max_order" in name}
    assert told == {f"ngram max_order={n}": f"max_order must be an integer of at least 2, not {n}" for n in (0, 1)}
    assert labels(kept + configs[:1], ()) == ["ngram", "none"]
    assert labels([{"method": "ngram", "num_speculative_tokens": n} for n in (1, 2)], ()) == [
        "ngram num_speculative_tokens=1",
        "ngram num_speculative_tokens=2",
    ]


@pytest.mark.parametrize("key", ["method", "accept", "length"])
def test_what_is_chosen_for_all_methods_is_no_option_of_one(key):
    with pytest.raises(ConfigError, match=f"'{key}' applies to all methods"):
        method_configs(["ngram"], ["coupled"], ["fixed"], [], {"ngram": {key: "token"}})


@pytest.mark.parametrize("shared", [{"num_speculative_tokens": 5}, {"ngram": {"num_speculative_tokens": 5}}])
def test_a_draft_length_given_twice_is_refused(shared):
    refused(ConfigError, "twice", method_configs, ["ngram"], ["coupled"], ["fixed"], [2, 4], shared)


@pytest.mark.parametrize(("key", "more"), [("accept", ": rules are named by --accept"), ("max_ordr", "")])
def test_an_option_that_no_method_has(key, more):
    with pytest.raises(ConfigError, match=f"no method of ngram has an option '{key}'{more}$"):
        method_configs(["ngram"], ["coupled"], ["fixed"], [], {key: "token"})
