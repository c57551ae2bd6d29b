"""Where requests go, without replicas."""

import random
from collections import Counter
from types import SimpleNamespace

from forerun.scale.affinity import BOUND, Affinity, block_hashes, policy, replicas_needed

NAMES = ["a", "b", "c", "d"]


def prompt(group, own, shared=256, rest=64):
    """The names of the blocks of a prompt that begins as others of its group do."""
    first, then = random.Random(group), random.Random(1000 + own)
    tokens = [first.randrange(4096) for _ in range(shared)] + [then.randrange(4096) for _ in range(rest)]
    return list(block_hashes(tokens))


def idle(names=NAMES):
    return dict.fromkeys(names, 0)


def test_blocks_name_all_that_comes_before():
    one, two = list(block_hashes(range(200), 64)), list(block_hashes([9, *range(1, 200)], 64))
    assert (len(one), len(set(one) | set(two))) == (3, 6)
    assert list(block_hashes([*range(128), 7], 64)) == one[:2]


def test_a_prompt_goes_where_its_beginning_was():
    affinity = Affinity()
    homes = {}
    for own, group in enumerate([*range(40), *range(40), *range(40)]):
        names = prompt(group, own)
        best = affinity.order(idle(), names)[0]
        affinity.note(best, names)
        assert homes.setdefault(group, best) == best
    assert min(Counter(homes.values()).values()) >= 4
    moved = prompt(3, 999)
    affinity.note("c" if homes[3] != "c" else "d", [*moved[:4], b"its own"])
    assert affinity.order(idle(), moved)[0] == ("c" if homes[3] != "c" else "d")


def test_no_replica_is_preferred_beyond_its_share():
    """One beginning that everybody has, and nothing that ever ends."""
    affinity, load = Affinity(), idle()
    for own in range(200):
        names = prompt(0, own)
        best = affinity.order(load, names)[0]
        affinity.note(best, names)
        load[best] += 1
        assert load[best] <= BOUND * sum(load.values()) / len(load) + 1
    assert len(set(load)) == 4


def test_a_session_stays_and_moves_when_its_replica_ends():
    affinity = Affinity()
    home = affinity.order(idle(), [], "s")[0]
    affinity.note(home, [], "s")
    for _ in range(5):
        assert affinity.order(idle(), prompt(random.randrange(99), 0), "s")[0] == home
    assert affinity.order({**idle(), home: 9}, [], "s")[0] != home
    affinity.forget(home)
    left = [name for name in NAMES if name != home]
    assert affinity.order(idle(left), [], "s")[0] in left


def test_routers_that_know_nothing_agree_and_a_lost_replica_takes_only_its_own():
    orders = [[Affinity().order(idle(), prompt(group, own)) for group in range(60)] for own in range(2)]
    assert orders[0] == orders[1]
    for order in orders[0]:
        left = [name for name in NAMES if name != "b"]
        again = Affinity().order(idle(left), prompt(orders[0].index(order), 5))
        assert again == [name for name in order if name != "b"]


def test_short_prompts_go_where_least_is_done():
    assert Affinity().order({"a": 3, "b": 1, "c": 2}, []) == ["b", "c", "a"]


def test_who_is_refused_meets_every_replica():
    """Though each that it meets is noted as the one that has its beginning."""
    for right in NAMES:
        affinity, met, names = Affinity(), [], prompt(3, 4)
        while right not in met:
            met.append(affinity.order(idle(), names, rejections=len(met))[0])
            affinity.note(met[-1], names)
        assert len(met) <= 2 * len(NAMES)
    assert sorted(Affinity().order(idle(), names, rejections=7)) == sorted(NAMES)


def test_memory_is_bounded():
    affinity = Affinity(remembered=100)
    for own in range(100):
        affinity.note("a", prompt(own, own), f"s{own}")
    assert len(affinity._seen) == 100


def test_replicas_follow_queue_and_pages():
    """Eight sequences a replica at a time, of which six are aimed at."""
    assert replicas_needed(2, requests=12, usage=0.3, capacity=8) == 2
    assert replicas_needed(2, requests=13, usage=0.3, capacity=8) == 3
    assert replicas_needed(2, requests=2, usage=0.95, capacity=8) == 3
    assert replicas_needed(4, requests=1, usage=0.1, capacity=8) == 1
    assert replicas_needed(4, requests=7, usage=0.7, capacity=8) == 4
    assert replicas_needed(1, requests=0, usage=0.0, capacity=8) == 1
    assert replicas_needed(2, requests=800, usage=0.9, capacity=8) == 134


def test_a_front_that_listens_is_no_load():
    """Six answers at each of two replicas, to which two fronts listen: Ray counts sixteen requests."""

    def told(**each):
        return {name: {"a": value, "b": value} for name, value in each.items()}

    context = SimpleNamespace(current_num_replicas=2, target_num_replicas=2, total_num_requests=16)
    context.aggregated_metrics = told(usage=0.3, capacity=8, listeners=2)
    assert policy(context) == (2, {})
    context.aggregated_metrics = told(usage=0.3, capacity=8, listeners=0)
    assert policy(context) == (3, {})
    context.aggregated_metrics = {}
    assert policy(context) == (2, {})
