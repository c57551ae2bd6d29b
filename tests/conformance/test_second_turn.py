"""The second turn of a chat begins in the prefix cache, whatever drafts and whoever drafts beside it."""

from functools import cache
from itertools import combinations_with_replacement, product
from pathlib import Path

import pytest
from matrix import CHAINS, unless_of_lab

from forerun import SamplingParams
from forerun.core.errors import ConfigError
from forerun.sampling.params import BeamSearchParams
from forerun.speculate.draft import drafters
from harness import check_idle

PAGE = 8
LONGEST = 160
COLD = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
WARM = SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True, seed=3)
THREE = SamplingParams(temperature=0.8, max_tokens=9, ignore_eos=True, seed=4, n=3)
BEAMS = BeamSearchParams(beam_width=2, max_tokens=6)
METHODS = [case.method for case in unless_of_lab(CHAINS)]
COMPOSED = ("cascade", "merged")
ALONE = [method for method in METHODS if method not in COMPOSED]
"""They need no other drafter."""
HEADS = {"dflash", "eagle", "mtp"}
"""They feed on hidden states."""
GROUPS = [ALONE[first::3] for first in range(3)]
PAIRS = [*product(("cascade", "merged"), combinations_with_replacement(range(3), 2))]
FAMILIES = ("llama", "windows", "state")


@pytest.fixture(scope="session")
def families(tiny_target, described, hybrid):
    return {"llama": tiny_target, "windows": described("gemma3"), "state": hybrid("qwen3_5")}


@pytest.fixture(scope="session")
def options(families, tmp_path_factory):
    """``options(method, family="llama")``: a ``speculative_config`` of the method for the family's model."""

    @cache
    def get(method, family="llama"):
        example = drafters[method].example(Path(families[family]), tmp_path_factory.mktemp(method))
        return {"method": method, "num_speculative_tokens": 3, **example}

    return get


class Talk:
    """What an engine answers in a chat, and how many tokens of each prompt it took from its prefix cache."""

    def __init__(self, built, methods=(None,)):
        self.built, self.methods = built, methods
        self.jobs, self.answers, self.cached = [], [], []
        self.readmitted = []

    def ask(self, prompt, params, index=0, preempt=False):
        built = self.built
        jobs = built.add(prompt, params, method=self.methods[index % len(self.methods)])
        admitted = built.scheduler.on_admit
        while built.busy:
            built.step()
            if preempt and jobs[0].sequence in built.scheduler.running and jobs[0].sequence.num_output > 9:
                preempt = False
                self.readmitted.append(jobs[0].sequence.num_computed_tokens)
                built.scheduler.on_admit = lambda sequence, reused: self.readmitted.append(reused)
                built.scheduler.preempt(jobs[0].sequence)
        built.scheduler.on_admit = admitted
        assert not any(job.metrics.draft_error for job in jobs)
        self.answers += [job.output_ids for job in jobs]
        self.cached += [job.metrics.num_cached_tokens for job in jobs]
        self.jobs += jobs if isinstance(params, SamplingParams) else ()
        return jobs[0]

    def chat(self):
        """A turn, another one, its retry, three answers, a beam search, and a turn that is preempted."""
        first = self.built.tokenizer.encode("Tell me about the cat on the mat.")
        said = first + self.ask(first, COLD).output_ids + self.built.tokenizer.encode(" And the dog?")
        answer = self.ask(said, COLD, 1).output_ids
        self.ask(said, WARM, 2)
        self.ask(said + answer, THREE, 3)
        self.ask(said, BEAMS, 4)
        self.ask(said + answer + first, COLD, 5, preempt=True)
        check_idle(self.built, self.jobs)
        return self


@pytest.fixture(scope="session")
def talk(engine, families):
    """``talk(configs, family="llama", methods=(None,))``: a chat with these drafters, on pages of ``PAGE`` tokens."""

    def get(configs=None, family="llama", methods=(None,)):
        limits = {"max_model_len": LONGEST, "page_size": PAGE, "max_num_seqs": 4}
        return Talk(engine(configs, model=families[family], **limits), methods).chat()

    return get


@pytest.fixture(scope="session")
def plainly(talk):
    return cache(lambda family: talk(family=family))


@pytest.mark.parametrize(("method", "family"), [*product(METHODS, FAMILIES)])
def test_every_drafter_keeps_the_prefix(talk, plainly, options, method, family):
    plain = plainly(family)
    assert min(plain.cached[1:]) >= 32
    got = talk(options(method, family), family)
    # A state is kept as it was where the last round began; plain rounds are one token long.
    behind = 3 if family == "state" else 0
    assert all(0 <= most - cached <= behind for most, cached in zip(plain.cached, got.cached, strict=True))
    assert got.answers == plain.answers
    computed, reused = got.readmitted
    assert reused >= computed // PAGE * PAGE - behind
    if method in HEADS:
        assert all(job.metrics.num_drafts for job in got.jobs[:6])


def test_drafters_share_the_prefix(talk, plainly, options):
    """All of them in one engine, which take turns in a chat."""
    for first in range(len(ALONE)):
        methods = ALONE[first:] + ALONE[:first]
        got = talk([options(method) for method in ALONE], methods=methods)
        assert (got.cached, got.answers) == (plainly("llama").cached, plainly("llama").answers)


@pytest.mark.parametrize(("outer", "groups"), PAIRS)
def test_all_pairs_inside_a_drafter(talk, plainly, options, outer, groups):
    """Every two drafters are together in one of these."""
    names = [name for group in dict.fromkeys(groups) for name in GROUPS[group]]
    inner = [{**options(name), "num_speculative_tokens": 2} for name in names]
    got = talk({"method": outer, "drafters": inner})
    assert (got.cached, got.answers) == (plainly("llama").cached, plainly("llama").answers)


@pytest.mark.parametrize("method", METHODS)
def test_what_can_be_inside_staged(talk, plainly, families, options, method):
    config = {"method": "staged", "model": families["llama"], "drafter": options(method)}
    if method in HEADS:
        with pytest.raises(ConfigError, match="hidden states"):
            talk(config)
        return
    got = talk(config)
    assert (got.cached, got.answers) == (plainly("llama").cached, plainly("llama").answers)
    assert any(job.metrics.num_drafts for job in got.jobs)
