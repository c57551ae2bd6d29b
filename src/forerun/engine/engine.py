"""The engine: ``add``, ``step``, ``abort``. A step schedules, runs a speculative round and publishes its tokens."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from time import perf_counter
from typing import Any, TypeVar

import torch

from forerun import kernels
from forerun.attention.base import Attention
from forerun.cache.pool import Pool
from forerun.cache.prefix import PrefixTree
from forerun.core.config import drawn
from forerun.core.errors import ConfigError, RequestError, shown
from forerun.core.inference import inference
from forerun.core.request import Requests, RequestState
from forerun.core.threads import MOST_THREADS, CoresLeft, Threads, check_threads, usable_cores
from forerun.core.tree import Draft, Verdict
from forerun.engine import beams
from forerun.engine.admission import Validator, token_ids
from forerun.engine.config import NONE, EngineConfig, SpeculativeConfig
from forerun.engine.grammar import GrammarCompiler
from forerun.engine.jobs import Job, Update, emitted_logprobs, prompt_logprobs
from forerun.engine.memory import budget, share
from forerun.engine.metrics import EngineStats, RequestMetrics, RoundTrace
from forerun.engine.scheduler import PrefillBudget, Scheduler
from forerun.engine.stop import ABORT, ERROR, Finish, Stopper
from forerun.engine.trials import trials
from forerun.models.files.open import Checkpoint
from forerun.models.run.base import Model, new_attention
from forerun.models.text.tokenizer import Detokenizer
from forerun.sampling.draw import Sampler
from forerun.sampling.noise import fold
from forerun.sampling.params import BeamSearchParams, Params, SamplingParams
from forerun.speculate.accept.base import NAN
from forerun.speculate.draft import DraftContext, drafters
from forerun.speculate.draft.memory import PATIENCE, Memory
from forerun.speculate.draft.router import Router
from forerun.speculate.length import Setting, policies
from forerun.speculate.round import Round, speculate
from forerun.speculate.verify import Target

log = logging.getLogger("forerun")
LOOKUP, PREDICTED = "prompt_lookup", 16
"""The drafter of requests with a prediction where no loaded one looks up in texts, and the length of its drafts."""
CONTEXT = 8
"""Tokens of the prompt that precede a prediction."""
R = TypeVar("R")


def _weak(method: Callable[..., R]) -> Callable[..., R]:
    """A bound method that does not keep its object: an engine in a cycle would keep its memory until a collection."""
    target, function = weakref.proxy(method.__self__), method.__func__  # type: ignore[attr-defined]
    return lambda *arguments: function(target, *arguments)


class Engine:
    """Runs one target with any number of drafters over many requests at once."""

    def __init__(
        self,
        model: Model,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        speculative: SpeculativeConfig | Sequence[SpeculativeConfig] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.config = config or EngineConfig()
        configs = SpeculativeConfig.parse_all(speculative)
        self.speculative = configs[0]
        self.model = model
        self.tokenizer = tokenizer
        self.clock = clock
        self.max_model_len = self.config.max_model_len or model.info.max_len
        if self.max_model_len > model.info.max_len:
            raise ConfigError(
                f"max_model_len {self.max_model_len} exceeds the model's context of {model.info.max_len} tokens"
            )
        # Drafters ask for the sampler and the rule. What they then need decides the rest: how far drafts reach, which
        # hidden states are kept, and how many entries behind a sequence's last token its cache must hold.
        self.sampler = Sampler(model.info.vocab_size, model.info.device)
        self.rule = self.speculative.make_rule()
        self.max_nodes = max((c.drafter.max_nodes() for c in configs if c.drafter is not None), default=0)
        self.on_close: list[Callable[[], object]] = []
        self.memory = self._open_memory()
        context = self._draft_context()
        self.router = Router(
            {c.method: drafters[c.method].build(c.drafter, context) for c in configs if c.drafter is not None}
        )
        if self.memory is not None and not self.memory.used:
            raise ConfigError("memory needs a drafter that looks up in it: choose method suffix, or remove memory")
        self.policy = policies[self.speculative.length](self._setting())
        rows = max((drafter.needs.rows for drafter in self.router.drafters.values()), default=0)
        attention = new_attention(
            model,
            max_seqs=self.config.max_num_seqs,
            max_len=self.max_model_len,
            page_size=self.config.page_size,
            slack=self.max_nodes,
            back=self.max_nodes + rows + 1,
            keeps=self.config.caches_prefixes,
        )
        # Every cache exists now, none has pages yet: target and drafters share one budget, a page of each for a page.
        memory = budget(self.config.kv_cache_bytes, self.config.gpu_memory_utilization, model.info.device)
        share([attention.pool, *self.router.pools()], memory, self.config.num_pages, self.config.tensor_parallel_size)
        # A small cache bounds the context, so requests are checked against what it has become.
        if self.config.max_model_len is None:
            self.max_model_len = min(self.max_model_len, attention.pool.num_tokens)
        self.validator = Validator(model.info, tokenizer, self.max_model_len, attention.pool.sources)
        self.target = Target(model, attention, self.router.hidden)
        states = [pool.states for pool in self.pools if pool.states is not None]
        # Twice as many states as sequences: beams begin while others end.
        self.scheduler = Scheduler(
            attention.pool,
            max_num_seqs=min([self.config.max_num_seqs, *(each.count // 2 for each in states)]),
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            draft_rows=self.policy.longest_nodes,
            most_nodes=min((each.depth for each in states), default=None),
            prefill_budget=PrefillBudget(self.config.max_prefill_tokens),
            tree=PrefixTree(attention.pool) if self.config.caches_prefixes else None,
            reusable=_weak(self._reusable),
            on_admit=_weak(self._admitted),
            on_preempt=_weak(self._preempted),
        )
        # Last: it looks at what the layers have become.
        self._compiled = getattr(model, "fused", None) is not None
        """Whether our kernels compute all layers of the model."""
        self.threads = self._threads()
        self._choose_graphs()
        self.stats = EngineStats(synthetic=self.speculative.synthetic is not None)
        self.jobs: dict[int, Job] = {}
        self.on_round: Callable[[Round], None] | None = None
        """Called with every round at its end, for measurements."""
        self._ids = itertools.count()
        self._largest = 0
        """The most sequences of a batch that the length policy was told of."""

    def _setting(self) -> Setting:
        """What the length policy knows of the target and the drafters."""
        router = self.router
        return Setting(
            {name: drafter.config.nodes_by_depth() for name, drafter in router.drafters.items()},
            self.model.row_multiple,
            _weak(router.backlog),
            frozenset(name for name, drafter in router.drafters.items() if drafter.models()),
            frozenset(name for name, drafter in router.drafters.items() if drafter.can_skip),
            self.model.info.mixture,
            parts={name: drafter.parts() for name, drafter in router.drafters.items()},
            trials=partial(trials, weakref.proxy(self)),
            threads=partial(_threads, weakref.proxy(self)),
            busy=CoresLeft().busy,
        )

    def _threads(self) -> Threads:
        """The configured number of CPU threads. "auto" adapts it if kernels compute all layers."""
        count = check_threads(self.config.threads)
        if count is not None:
            return Threads(count, fixed=True)
        adapts = self._compiled and self.config.tensor_parallel_size == 1
        most = min(torch.get_num_threads(), usable_cores() if adapts else MOST_THREADS)
        return Threads(most, fixed=not adapts, cores_left=CoresLeft())

    def _choose_graphs(self) -> None:
        """Turns CUDA graphs off if the configuration says so."""
        models = [self.model, *(model for each in self.router.drafters.values() for model in each.models())]
        graphs = [each for model in models if (each := getattr(model, "graphs", None)) is not None]
        if self.config.enforce_eager and not graphs:
            log.info("enforce_eager says nothing here: no round uses CUDA graphs")
        for each in graphs:
            each.enabled = not self.config.enforce_eager

    def _open_memory(self) -> Memory | None:
        """It is saved when the engine is closed, and when it or the process ends without that."""
        config, info = self.config, self.model.info
        if config.memory is None:
            return None
        print_of = Checkpoint.open(info.name).fingerprint(info.lora)
        memory = Memory(config.memory, print_of, info.vocab_size, config.memory_bytes)
        self.on_close.append(partial(memory.save, PATIENCE))
        weakref.finalize(self, memory.save, PATIENCE)
        return memory

    def _draft_context(self) -> DraftContext:
        return DraftContext(
            target=self.model,
            sampler=self.sampler,
            rule=self.rule,
            tokenizer=self.tokenizer,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.max_model_len,
            dtype=self.config.dtype,
            options={
                "page_size": self.config.page_size,
                "model_path": self.config.model_path,
                "weights": self.config.weights,
            },
            prefix_caching=self.config.caches_prefixes,
            target_attention=_weak(self._attention),
            memory=self.memory,
        )

    def _attention(self) -> Attention:
        return self.target.attention

    def add(
        self,
        prompt: Sequence[int],
        params: Params,
        *,
        decoder_prompt: Sequence[int] | None = None,
        speculate: bool = True,
        method: str | None = None,
        max_draft: int | None = None,
        trace: bool = False,
        priority: int = 0,
        committed: Sequence[int] = (),
        prediction: Sequence[int] = (),
    ) -> list[Job]:
        """Queues a request.

        Args:
            prompt: token ids; what the encoder of an encoder-decoder reads.
            params: how to sample, or how to search.
            decoder_prompt: what an encoder-decoder's decoder continues; None: the checkpoint's start tokens.
            speculate: False decodes plainly.
            method: one of the loaded drafters; None: the first.
            max_draft: bounds this request's drafted tokens per round.
            trace: records its rounds.
            priority: lower values go first, within bounds.
            committed: tokens of the answer that were generated before; they are continued.
            prediction: what the answer may be; its parts are drafted where the answer agrees with it so far.

        Returns:
            Its ``params.n`` jobs. The answers of a beam search, best first, come together at its end.

        Raises:
            RequestError: it cannot be run.
        """
        if not isinstance(speculate, bool):
            raise RequestError(f"speculate must be true or false, not {shown(speculate)}", param="speculate")
        search = params if isinstance(params, BeamSearchParams) else None
        if search is not None:
            params = beams.admit(search, self.model.info, trace)
        assert isinstance(params, SamplingParams)
        source, prompt, committed, params = self.validator.admit(prompt, decoder_prompt, params, committed)
        drafter = self._choose_drafter(method, max_draft) if speculate else None
        lookup: tuple[int, ...] = ()
        if prediction and drafter is not None:
            drafter = self._looking_up(drafter, chosen=method is not None)
            prediction = token_ids(prediction)
            self.validator.check_ids(prediction, "prediction")
            lookup = (*prompt[-CONTEXT:], *prediction)  # so that the beginning of the answer is found in it
        grammar = params.grammar
        seed = drawn(params.seed if params.seed is not None else self.config.seed)
        limit = min(self.max_model_len, len(prompt) + (params.max_tokens or self.max_model_len))
        jobs: list[Job] = []
        for index in range(params.n if search is None else search.n):
            sequence = RequestState(
                id=next(self._ids),
                tokens=[*prompt, *committed],
                num_prompt=len(prompt),
                params=params,
                seed=seed if index == 0 else fold(seed, index),
                eos_ids=self.model.info.eos_ids,
                max_tokens=limit,
                drafter=drafter,
                max_draft=max_draft,
                constraint=self.grammars.start(grammar) if grammar is not None else None,
                priority=priority,
                source=source,
                lookup=lookup,
            )
            detokenizer = None
            if self.tokenizer is not None:
                detokenizer = Detokenizer.of(self.tokenizer, sequence)
                detokenizer.add(committed)
            metrics = RequestMetrics(start=self.clock(), synthetic=self.stats.synthetic)
            job = Job(sequence, Stopper(sequence, detokenizer), metrics, index, traced=trace or self.config.trace)
            if search is None or beams.attach(job, jobs, search, self._ids.__next__):
                self.scheduler.add(sequence)
            self.jobs[sequence.id] = job
            jobs.append(job)
        self.stats.prompt_tokens += len(jobs[0].sequence.prompt)
        return jobs

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles structured outputs; may be used ahead of ``add`` and from any thread."""
        info, config = self.model.info, self.config
        return GrammarCompiler(
            self.tokenizer, info.vocab_size, info.eos_ids, longest=config.max_grammar_bytes,
            memory=config.grammar_bytes, reasoning_parser=config.reasoning_parser,
        )  # fmt: skip

    def _choose_drafter(self, method: str | None, max_draft: int | None) -> str | None:
        loaded = self.router.drafters
        if method is None:
            method = next(iter(loaded), None)
        elif not isinstance(method, str) or method not in loaded:
            raise RequestError(f"method {method!r} is not loaded; loaded: {', '.join(loaded) or NONE}", param="method")
        limit = loaded[method].config.num_speculative_tokens if method is not None else 0
        if max_draft is not None and not 0 <= max_draft <= limit:
            raise RequestError(
                f"num_speculative_tokens must be from 0 to {limit} here, not {max_draft}",
                param="num_speculative_tokens",
            )
        return method

    def _looking_up(self, drafter: str, chosen: bool) -> str:
        """The drafter for a request with a prediction: its own, another loaded one, or one that is loaded for them."""
        loaded = self.router.drafters
        if loaded[drafter].looks_up:
            return drafter
        if chosen:
            raise RequestError(f"method {drafter!r} drafts from no prediction: remove one", param="prediction")
        name = next((name for name, each in loaded.items() if each.looks_up), None)
        if name is None:
            has_states = self.target.attention.pool.states is not None  # they can be taken back by that many tokens
            kind, depth = drafters[LOOKUP], min(PREDICTED, self.max_nodes) if has_states else PREDICTED
            name, config = LOOKUP, kind.config_class(num_speculative_tokens=depth)
            loaded[name] = kind.build(config, self._draft_context())
            self.policy.add(name, config.nodes_by_depth(), loaded[name].parts())
        return name

    def abort(self, job: Job) -> None:
        """Ends a request now and frees everything it holds."""
        for each in job.peers or [job]:
            if each.finish is None:
                self.end(each, Finish(ABORT))

    def fail(self, message: str) -> list[Update]:
        """Ends all running requests with an error, after a failed step. Waiting requests are not affected."""
        roots = [self.jobs[sequence.id] for sequence in list(self.scheduler.running)]
        jobs = [job for root in roots for job in root.peers or [root]]
        for job in jobs:
            self.end(job, Finish(ERROR, message))
        return [Update(job, [], job.finish) for job in jobs]

    def pause(self, job: Job) -> None:
        """Takes an unfinished request off the engine and frees its pages. ``resume`` queues it to be recomputed."""
        self.scheduler.remove(job.sequence)
        job.sequence.num_computed_tokens = job.sequence.scheduled = 0
        self._preempted(job.sequence)

    def resume(self, job: Job) -> None:
        self.scheduler.add(job.sequence)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    @inference
    def step(self) -> list[Update]:
        """Runs one round and returns what it did for each of its sequences; nothing if none is scheduled."""
        self._expect()
        start = self.clock()
        sequences = self.scheduler.schedule()
        if not sequences:
            return []
        prefilling = {s.id for s in sequences if s.scheduled > 1 or not s.num_output}
        self.stats.threads = self.threads.begin(sum(sequence.scheduled for sequence in sequences))
        with kernels.on_threads(self.stats.threads, alone=self._compiled):
            result = speculate(sequences, self.target, self.router, self.rule, self.policy, self.sampler, self._clip)
        updates = self._publish(sequences, prefilling, result)
        if any(verdict.error == NAN for verdict in result.verdicts):
            self.target.attention.pool.scrub()  # a stop may have ended the sequence before its NaN
        self.scheduler.observe(self.clock() - start)
        self.threads.observe(result.verification.batch.num_rows, self.clock() - start)
        self.stats.rounds += 1
        seconds = result.seconds
        self.stats.draft_seconds += seconds.draft
        self.stats.verify_seconds += seconds.verify
        self.stats.accept_seconds += seconds.accept
        host = self.clock() - start - seconds.draft - seconds.verify - seconds.accept
        self.stats.host_seconds += host
        self.policy.observe_host(host)
        if self.on_round is not None:
            self.on_round(result)
        return updates

    @inference
    def prepare(self, requests: int = 1) -> None:
        """Measures what drafts of so many requests cost, unless it is known. Else the first answers wait for it."""
        with kernels.on_threads(_threads(self), alone=self._compiled):
            self.policy.expect(requests)

    def _expect(self) -> None:
        """Tells the length policy of a larger batch than any before, while there are pages for made-up requests."""
        waiting = self.scheduler.waiting
        if not waiting or not any(each.drafter is not None and each.remaining > 1 for each in waiting):
            return
        count = min(self.config.max_num_seqs, len(self.scheduler.running) + len(waiting))
        if count > self._largest:
            self._largest = count
            self.prepare(count)

    def _clip(self, sequence: RequestState, draft: Draft, verdict: Verdict) -> list[int]:
        if sequence.group is not None:  # the beam search ends its beams itself
            return verdict.decided_tokens(draft)
        return self.jobs[sequence.id].stopper.clip(draft, verdict)

    def _publish(self, sequences: Requests, prefilling: set[int], result: Round) -> list[Update]:
        """Counts a round, ends finished answers, and returns every sequence's update."""
        now = self.clock()
        updates = [update for group in result.groups for update in beams.publish(self, group, prefilling, result, now)]
        for index, (sequence, draft, verdict) in enumerate(zip(sequences, result.drafts, result.verdicts)):
            if sequence.group in result.groups:
                continue
            job = self.jobs[sequence.id]
            if sequence.params.prompt_logprobs is not None and sequence.num_output <= len(verdict.tokens):
                prompt_logprobs(job, result.verification, index, sequence)
            if verdict.token is None:
                if self.target.attention.pool.has_nan(sequence.id, sequence.num_computed_tokens - verdict.fed):
                    # No logits of these rows are looked at, and others must not get their cache entries.
                    self.end(job, Finish(ERROR, NAN), now)
                    updates.append(Update(job, [], job.finish))
                continue
            if sequence.params.logprobs is not None and verdict.tokens:
                job.logprobs.extend(emitted_logprobs(result.verification, index, verdict, self.config.logprobs_mode))
            self.count(job, draft, verdict, sequence.id in prefilling, now)
            if job.stopper.finish is not None:
                self.end(job, job.stopper.finish, now)
            updates.append(Update(job, verdict.tokens, job.finish))
        return updates

    def count(self, job: Job, draft: Draft, verdict: Verdict, prefill: bool, now: float) -> None:
        """Counts a sequence's round in the metrics, and records what became of its draft."""
        metrics = job.metrics
        if metrics.first_token is None:
            metrics.first_token = now
        metrics.draft_error = self.router.failures.get(job.sequence.id)
        if not prefill:
            metrics.add(draft, verdict)
            if job.sequence.lookup and draft.method is not None and drafters[draft.method].looks_up:
                metrics.num_prediction_tokens += len(draft)
                metrics.num_accepted_prediction_tokens += verdict.accepted
        if job.traced:
            job.trace.append(RoundTrace.of(draft, verdict))
        job.drafted += [index < verdict.accepted for index in range(len(verdict.tokens))]
        self.stats.add(draft, verdict, len(job.sequence.tokens) - len(verdict.tokens))

    def end(self, job: Job, finish: Finish, now: float | None = None) -> None:
        """Ends an answer and frees what its sequence and its beams hold."""
        job.finish = finish
        job.metrics.end = now if now is not None else self.clock()
        self.scheduler.remove(job.sequence)
        if finish.reason == ERROR:
            self.target.attention.pool.scrub()
        elif self.memory is not None:
            self.memory.add(job.output_ids)
        for part in beams.parts(job.sequence):
            self.forget(part)
        del self.jobs[job.sequence.id]

    def forget(self, sequence: RequestState) -> None:
        """Frees what drafters and the length policy keep of a sequence that has ended. Its pages are free already: the
        scheduler does that, or the search that drops a beam."""
        self._release(sequence)
        self.policy.release(sequence)
        self.router.failures.pop(sequence.id, None)

    def _release(self, sequence: RequestState) -> None:
        """Frees what drafters keep of a sequence; NaN in its pages is cleared before others get them."""
        pools = self.router.pools()
        has_nan = any(pool.has_nan(sequence.id) for pool in pools)
        self.router.release(sequence)
        for pool in pools if has_nan else ():
            pool.scrub()

    def _reusable(self, sequence: RequestState) -> int:
        """How many leading tokens may come from the prefix cache; none with prompt logprobs, which need all logits."""
        if sequence.params.prompt_logprobs is not None and not sequence.num_output:
            return 0
        return len(sequence.tokens)

    def _admitted(self, sequence: RequestState, reused: int) -> None:
        metrics = self.jobs[sequence.id].metrics
        if self.config.caches_prefixes and not metrics.preemptions:
            metrics.num_cached_tokens = reused
            self.stats.prefix_queries += len(sequence.tokens)
            self.stats.prefix_hits += reused
            if self.target.attention.states is not None and self.scheduler.tree is not None:
                matched = self.scheduler.tree.matched.get(sequence.id, reused)
                self.stats.state_hits += reused > 0
                self.stats.prefix_reread += matched - reused

    def _preempted(self, sequence: RequestState) -> None:
        for part in beams.parts(sequence):
            self._release(part)
        if sequence.group is not None:
            sequence.group.restart()
        job = self.jobs[sequence.id]
        job.metrics.preemptions += 1
        if not sequence.num_output:
            job.prompt_logprobs = None
        self.stats.preemptions += 1

    @property
    def pools(self) -> list[Pool]:
        """Every KV pool: the target's, then the drafters'."""
        return [self.target.attention.pool, *self.router.pools()]

    def close(self) -> None:
        """Lets drafters save what they have learnt. The engine can be used afterwards."""
        self.router.close()
        for callback in self.on_close:
            callback()

    def check(self) -> None:
        """Raises AssertionError if a page is unaccounted for, or an idle engine still holds some."""
        for pool in self.pools:
            pool.check()
            holders = {*pool.block_tables, *(pool.sources.readers if pool.sources is not None else ())}
            if not self.jobs and holders:
                raise AssertionError(f"idle, but sequences {sorted(holders)} hold pages")

    @property
    def identity(self) -> bool:
        """Whether the same seed gives the same tokens as plain decoding: a coupled rule on bit-equal logits."""
        return self.rule.identity and self.model.invariant


def _threads(engine: Engine) -> int:
    """The number of threads that its rounds use, probes of others left out."""
    return engine.threads.counts[engine.threads.home]
