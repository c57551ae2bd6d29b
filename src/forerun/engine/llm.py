"""``LLM``: prompts in, texts out."""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from tqdm import tqdm

from forerun import kernels
from forerun.core.config import to_python
from forerun.core.errors import ConfigError, RequestError, shown
from forerun.engine import auto, beams
from forerun.engine.admission import token_ids
from forerun.engine.config import EngineConfig, SpeculativeConfig
from forerun.engine.engine import Engine
from forerun.engine.jobs import Job, Logprob, Update, by_token
from forerun.engine.metrics import RequestMetrics
from forerun.engine.outputs import CompletionOutput, Outputs, Pieces, RequestOutput, StreamPiece, one_answer
from forerun.engine.tuned import load as load_tuned
from forerun.models.files.open import Checkpoint, resolve
from forerun.models.formats.gguf_types import forms
from forerun.models.load import load_model
from forerun.models.text.chat import Message, conversations, render_chat
from forerun.models.text.infill import Hole, Infill, ending, files_of
from forerun.models.text.tokenizer import encode, load_tokenizer, with_end
from forerun.models.weights import lora
from forerun.sampling.params import BeamSearchParams, Params, SamplingParams

log = logging.getLogger("forerun")

Prompt = str | Mapping[str, Any] | Sequence[int]


class LLM:
    """A model that generates text, with speculation.

    Args:
        model: a folder, a GGUF file, ``hf:OWNER/NAME[:QUANTIZATION]`` or a fetched model's name. Default: the bundled
            target.
        speculative_config: vLLM's keys, plus ``accept`` and ``length``. A list of them loads several drafters.
            ``"auto"`` chooses a drafter for the model (``engine.auto.choose``). None decodes plainly.
        tuned: a folder that ``forerun tune`` made for this model, which says how to speculate. True: the bundled one.
        options: the fields of ``EngineConfig``, or vLLM's. ``block_size``, ``enable_prefix_caching``, ``revision`` and
            ``download_dir`` mean what they mean there. Options without effect here, such as
            ``trust_remote_code=False``, are accepted; others are refused, with what to do instead.

    Raises:
        ConfigError: options that are wrong, or that exclude each other.
        ModelError: a model, draft or adapter that cannot be loaded, with the reason.

    ``with LLM(...) as llm:`` closes it at the end. Without ``close``, memory is free once nobody refers to it.

    A child process may use its parent's ``LLM``, unless another thread was using that when it was forked.

    Threads may share one ``LLM``: a call has the engine to itself, and others wait. Give prompts that are to be decoded
    together to one call. For requests that come and go, use ``AsyncLLM``.
    """

    def __init__(
        self,
        model: str = "forerun:target",
        *,
        speculative_config: Mapping[str, Any]
        | SpeculativeConfig
        | Sequence[Mapping[str, Any]]
        | str
        | None = auto.AUTO,
        tuned: str | Path | bool | None = None,
        **options: Any,
    ) -> None:
        if tuned is not None and tuned is not False:
            if speculative_config != auto.AUTO:
                raise ConfigError("tuned conflicts with speculative_config: remove one")
            speculative_config = load_tuned(tuned, str(model), options.get("lora"))
        elif speculative_config == auto.AUTO:
            speculative_config = auto.choose(str(model), lora=options.get("lora"))
        self.config = EngineConfig.from_options(engine_options({"model": str(model), **options}))
        speculative = SpeculativeConfig.parse_all(speculative_config)
        self.speculative = speculative[0]
        config = self.config
        drafter = self.speculative.drafter
        parts = [each.config for each in getattr(drafter, "drafters", ())] or [drafter]
        kernels.asked.update(forms(str(getattr(part, "quantization", None)) for part in parts))
        loaded = load_model(
            config.model,
            dtype=config.dtype,
            device=config.device,
            invariant=config.invariant,
            model_path=config.model_path,
            weights=config.weights,
            quantization=config.quantization,
            max_model_len=config.max_model_len,
            lora=config.lora,
            tensor_parallel_size=config.tensor_parallel_size,
        )
        self.tokenizer = load_tokenizer(config.tokenizer or lora.tokenizer(config.lora) or config.model)
        sampling = {} if config.generation_config == "vllm" else Checkpoint.open(config.model).sampling
        loaded.info = replace(with_end(loaded.info, self.tokenizer), sampling=sampling)
        self._engine: Engine | None = Engine(loaded, self.tokenizer, config, speculative)
        auto.remember(self.engine)
        self._lock = threading.Lock()
        self._owner: int | None = None
        """The thread that holds the lock."""
        self._closed = "this LLM is closed"
        self._told = False
        """Whether the log has the model's sampling settings."""
        _all.add(self)

    @property
    def engine(self) -> Engine:
        """Raises ConfigError after ``close``."""
        if self._engine is None:
            raise ConfigError(f"{self._closed}: make another one")
        return self._engine

    @property
    def model(self) -> Any:
        return self.engine.model

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Returns a prompt's text, if it has one, and its token ids. Raises RequestError for anything but a prompt."""
        if isinstance(prompt, str):
            return prompt, encode(self.tokenizer, prompt)
        if isinstance(prompt, Mapping):
            if set(prompt) == {"encoder_prompt", "decoder_prompt"}:
                return self.encode(prompt["encoder_prompt"])
            if HOLE & set(prompt):
                hole = _hole(prompt)
                return hole.prefix, self.infill.prompt(hole)
            if not prompt or set(prompt) - {"prompt_token_ids", "prompt", "stop_at", "prediction"}:
                names = shown(list(prompt))
                raise RequestError(f"a prompt mapping has 'prompt_token_ids' or 'prompt', not {names}", param="prompt")
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if ids is None:
                return self.encode(text) if isinstance(text, str) else (None, _ids(text))
            if text is not None and not isinstance(text, str):
                raise RequestError(
                    f"beside 'prompt_token_ids', 'prompt' is a string, not {shown(text)}", param="prompt"
                )
            return text, _ids(ids)
        return None, _ids(prompt)

    @cached_property
    def infill(self) -> Infill:
        """Makes prompts with text after the cursor."""
        return Infill(self.tokenizer)

    def with_ending(self, prompt: Prompt, params: Params) -> Params:
        """The options with the end that a prompt asks for. Raises RequestError."""
        if not isinstance(prompt, Mapping) or not {*HOLE, "stop_at"} & set(prompt):
            return params
        if isinstance(params, BeamSearchParams):
            raise RequestError("beam search has no ends of its own: remove suffix and stop_at", param="stop_at")
        before = prompt.get("prompt")
        if not isinstance(before, str):
            raise RequestError("suffix and stop_at go with 'prompt', a string", param="prompt")
        return ending(params, prompt.get("stop_at"), before, self.infill.ends if HOLE & set(prompt) else ())

    def choices(self, prompt: Prompt) -> dict[str, Any]:
        """The token ids of a prompt's ``decoder_prompt`` and ``prediction``, if it has them; texts are encoded without
        special tokens."""
        given = dict(prompt) if isinstance(prompt, Mapping) else {}
        result: dict[str, Any] = {}
        for name in given.keys() & {"decoder_prompt", "prediction"}:
            value = given[name]
            if isinstance(value, str):
                result[name] = encode(self.tokenizer, value, add_special_tokens=False)
            elif value is not None:
                result[name] = self.encode(value)[1]
        return result

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params | Iterable[Params] | None = None,
        use_tqdm: bool | None = None,
        *,
        priority: Sequence[int] | None = None,
        speculate: bool = True,
        on_update: Callable[[Update], None] | None = None,
    ) -> list[RequestOutput]:
        """Answers every prompt; ``max_num_seqs`` are decoded at a time. Nothing starts unless every prompt is valid.

        If an error or an interrupt ends it early, the engine is left empty. Interrupts wait for the end of a round.

        Args:
            prompts: texts, token ids or ``{"prompt_token_ids": IDS}``. An encoder-decoder reads a prompt as its source;
                ``{"encoder_prompt": PROMPT, "decoder_prompt": PROMPT}`` also gives the beginning of the answer.
                ``{"prompt": TEXT, "suffix": TEXT}`` is filled in the middle, by the tokens that the model has for that.
                It may have ``stop_at`` (``line`` or ``block``: where the answer ends) and ``input_extra`` (other files
                of the repository, ``{"filename": TEXT, "text": TEXT}`` each). A mapping may have a ``prediction``, a
                text or token ids: what the answer may be, to draft from. It changes no token.
            sampling_params: one for all prompts or a list of one each; None: ``get_default_sampling_params``.
                ``BeamSearchParams`` among them are answered with their beams, the best first.
            use_tqdm: show a progress bar on standard error. None: if that is a terminal.
            priority: one number per prompt; lower ones go first.
            speculate: False decodes these prompts plainly, for comparison.
            on_update: called with every round's new tokens, in this thread.

        Returns:
            One output per prompt, in order. An answer that failed says so in ``finish_reason`` and ``stop_reason``.

        Raises:
            RequestError: a prompt or option that cannot be served.
            ConfigError: called from ``on_update``, or with lists of different lengths.
        """
        requests = self._run(prompts, sampling_params, use_tqdm, priority, speculate, on_update)
        return Outputs(self.output(text, jobs) for text, jobs in requests)

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool | None = None,
        *,
        speculate: bool = True,
    ) -> list[beams.BeamSearchOutput]:
        """Returns the best beams of every prompt, in order; no drafter changes them. The rest is as in ``generate``.

        Raises RequestError also if a search fails.
        """
        requests = self._run(prompts, beams.only(params), use_tqdm, None, speculate, None)
        return [beams.output(self.tokenizer, jobs) for _, jobs in requests]

    def _run(
        self,
        prompts: Prompt | Iterable[Prompt],
        given: Params | Iterable[Params] | None,
        use_tqdm: bool | None,
        priority: Sequence[int] | None,
        speculate: bool,
        on_update: Callable[[Update], None] | None,
    ) -> list[tuple[str | None, list[Job]]]:
        """Runs the prompts; returns each one's text and finished jobs."""
        batch = prompt_list(prompts)
        params = self.params_of(given, len(batch))
        ranks = priorities(priority, len(batch))
        requests: list[list[Job]] = []
        answers, disable = sum(item.n for item in params), None if use_tqdm is None else not use_tqdm
        with (
            self._exclusive(),
            Interrupts() as interrupts,
            tqdm(total=answers, desc="Answers", unit="answer", dynamic_ncols=True, disable=disable) as bar,
        ):
            engine, tokens_before = self.engine, self.engine.stats.generated_tokens
            encoded = [(*self.encode(prompt), self.choices(prompt)) for prompt in batch]
            params = list(map(self.with_ending, batch, params))
            try:
                for (_, ids, choices), options, rank in zip(encoded, params, ranks):
                    requests.append(self.engine.add(ids, options, speculate=speculate, priority=rank, **choices))
                with torch.inference_mode():  # entered once, not in every step
                    while engine.busy:
                        updates = engine.step()
                        interrupts.deliver()
                        if not bar.disable:
                            _advance(bar, updates, self.engine.stats.generated_tokens - tokens_before)
                        if on_update is not None:
                            _call_back(on_update, updates, interrupts)
            except BaseException:
                for job in [job for jobs in requests for job in jobs]:
                    self.engine.abort(job)
                raise
            return [(text, jobs) for (text, _, _), jobs in zip(encoded, requests)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        speculate: bool = True,
        on_update: Callable[[Update], None] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of several. Arguments not listed are those of ``generate``.

        Args:
            messages: mappings with ``role`` and ``content``, or lists of such.
            chat_template: Jinja, in place of the model's.
            add_generation_prompt: begin an answer after the messages.
            continue_final_message: continue the last message, the model's own; with ``add_generation_prompt=False``.
            chat_template_kwargs: the template's variables.
            tools: as in OpenAI's API, for the template; the model's calls come as text.

        Returns:
            One output per conversation, in order.

        Raises:
            RequestError: the model has no template, or it refuses the messages.
        """
        template = {
            "chat_template": chat_template, "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message, "chat_template_kwargs": chat_template_kwargs,
            "tools": tools,
        }  # fmt: skip
        prompts = [self.chat_prompt(conversation, **template) for conversation in conversations(messages)]
        return self.generate(prompts, sampling_params, speculate=speculate, on_update=on_update, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Sequence[Message], **template: Any) -> Prompt:
        """A conversation as a prompt. ``template``: the arguments of ``chat`` for it. Raises RequestError."""
        (conversation,) = conversations([messages])
        text = render_chat(self.tokenizer, conversation, **template)
        ids = encode(self.tokenizer, text, add_special_tokens=False)  # the template has them
        return {"prompt": text, "prompt_token_ids": ids}

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, speculate: bool = True
    ) -> Iterator[StreamPiece]:
        """Yields one answer token by token, as it is decoded. The last piece has the whole ``output``.

        The engine is in use until the iterator has ended or is closed: other threads' calls wait, and this thread's
        are refused. An iterator that is closed early, as by ``break``, ends the request.

        Raises:
            RequestError: the prompt or an option cannot be served.
            ConfigError: this thread has not closed an earlier stream.
        """
        params: Params = one_answer(sampling_params or self.default_params())
        with self._exclusive():
            text, ids = self.encode(prompt)
            params = self.with_ending(prompt, params)
            (job,) = self.engine.add(ids, params, speculate=speculate, **self.choices(prompt))
            made = Pieces(job, self.tokenizer, lambda: self.output(text, [job]))
            try:
                while job.finish is None:
                    with Interrupts(), torch.inference_mode():
                        updates = self.engine.step()
                    for update in updates:
                        yield from made.of(update.tokens, update.finish)
            finally:
                self.engine.abort(job)

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        **template: Any,
    ) -> Iterator[StreamPiece]:
        """Yields the answer to a conversation, as ``stream`` does. ``template``: arguments of ``chat`` that make the
        prompt, such as ``tools``."""
        return self.stream(self.chat_prompt(messages, **template), sampling_params, speculate=speculate)

    def __repr__(self) -> str:
        if self._engine is None:
            return "LLM(closed)"
        return f"LLM({self.config.model!r}, drafts: {', '.join(self.engine.router.drafters) or 'none'})"

    def get_tokenizer(self) -> Any:
        """The tokenizer, as transformers has it."""
        return getattr(self.tokenizer, "full", self.tokenizer)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets drafters save what they have learnt (``adapt``), and frees the model and its caches. Nothing can be
        generated afterwards."""
        with self._exclusive():
            if self._engine is not None:
                self._engine.close()
            self._engine = None

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Gives this thread the engine, once other threads' calls are done."""
        if self._owner == threading.get_ident():
            raise ConfigError(
                "this LLM is in use by this thread: close its stream first; on_update must not call its own LLM"
            )
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    def get_default_sampling_params(self) -> SamplingParams:
        """The options of requests without any: the model's own settings, else neutral ones."""
        return SamplingParams(**self.model.info.sampling)

    def params_of(self, given: Params | Iterable[Params] | None, count: int) -> list[Params]:
        """One for each of ``count`` prompts. Raises ConfigError."""
        if given is None or isinstance(given, Params):
            return [given or self.default_params()] * count
        several: list[Any] = list(given) if isinstance(given, Iterable) and not isinstance(given, Mapping) else [given]
        for item in several:
            if not isinstance(item, Params):
                raise ConfigError(f"sampling_params must be SamplingParams, or one each, not {type(item).__name__}")
        if len(several) != count:
            raise ConfigError(f"{len(several)} sampling_params for {count} prompts: pass one, or one per prompt")
        return several

    def default_params(self) -> SamplingParams:
        """The default options; the log says so once."""
        own = self.model.info.sampling_line
        if own and not self._told:
            log.warning("sampling by the model's own settings, %s: pass SamplingParams for others", own)
            self._told = True
        return self.get_default_sampling_params()

    def output(self, text: str | None, jobs: list[Job]) -> RequestOutput:
        """What finished jobs answered."""
        outputs, sequence = [], jobs[0].sequence
        for job in jobs:
            assert job.finish is not None
            logprobs = job.logprobs if sequence.params.logprobs is not None else None
            total = None if logprobs is None else sum(item.logprob for item in logprobs)
            outputs.append(
                CompletionOutput(
                    index=job.index,
                    text=job.text,
                    token_ids=job.output_ids,
                    finish_reason=job.finish.reason,
                    stop_reason=job.finish.stopped_by,
                    logprobs=None if logprobs is None else by_token(logprobs, self.tokenizer, sequence.prompt),
                    cumulative_logprob=total if job.beam is None else job.beam.logprob,
                    trace=job.trace if self.config.trace else None,
                    drafted=job.drafted,
                )
            )
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if jobs[0].prompt_logprobs is not None:
            known = [item for item in jobs[0].prompt_logprobs if item is not None]
            prompt_logprobs = [None, *by_token(known, self.tokenizer, sequence.prompt[:1])]
        metrics = RequestMetrics.merged([job.metrics for job in jobs])
        result = RequestOutput(text, sequence.prompt, outputs, metrics, prompt_logprobs, str(sequence.id))
        vars(result)["_tokenizer"] = self.tokenizer
        return result


_all: weakref.WeakSet[LLM] = weakref.WeakSet()


def _after_fork() -> None:
    """A child process has none of the parent's other threads, so nobody would end their calls."""
    for llm in list(_all):
        if llm._lock.locked() and llm._owner != threading.get_ident():
            llm._lock, llm._owner, llm._engine = threading.Lock(), None, None
            llm._closed = "another thread was using this LLM when this process was forked"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def priorities(given: Sequence[int] | None, count: int) -> list[int]:
    """One for each of ``count`` prompts. Raises ConfigError."""
    several = [0] * count if given is None else list(given) if isinstance(given, Iterable) else []
    if len(several) != count or any(not isinstance(value, int) for value in several):
        raise ConfigError(f"priority must list one integer for each of the {count} prompts, not {given!r}")
    return several


def prompt_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """A list of the prompts, which may be one prompt or several."""
    if isinstance(prompts, (str, bytes, bytearray, Mapping)):
        return [cast(Prompt, prompts)]
    prompts = to_python(prompts)
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}")
    batch = [to_python(prompt) for prompt in prompts]
    single = bool(batch) and isinstance(batch[0], int)
    return [cast(Sequence[int], batch)] if single else cast(list[Prompt], batch)


HOLE = {"suffix", "input_extra"}
"""Keys of a prompt with other text than what is before the cursor, which is its ``prompt``."""


def _hole(given: Mapping[str, Any]) -> Hole:
    """Raises RequestError."""
    unknown = sorted(set(given) - {*HOLE, "prompt", "stop_at", "prediction"})
    if unknown:
        raise RequestError(f"a prompt with a suffix has no {shown(unknown[0])}: remove it", param="prompt")
    for name in ("prompt", "suffix"):
        if not isinstance(given.get(name, ""), str):
            raise RequestError(f"{name} must be a string, not {shown(given[name])}", param=name)
    return Hole(given.get("prompt", ""), given.get("suffix", ""), files=files_of(given.get("input_extra", ())))


def _ids(prompt: Any) -> list[int]:
    prompt = to_python(prompt)
    kind = type(prompt).__name__
    if isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes, bytearray, memoryview)):
        if not len(prompt) or not all(isinstance(each, str) for each in prompt):
            return token_ids(prompt)
        kind = f"a {kind} of texts"
    raise RequestError(f"a prompt is a string, a list of token ids or a mapping, not {kind}", param="prompt")


def _advance(bar: tqdm, updates: Sequence[Update], tokens: int) -> None:
    """Counts finished answers, and shows the tokens per second so far."""
    if seconds := bar.format_dict["elapsed"]:
        bar.set_postfix_str(f"{tokens / seconds:.0f} tokens/s", refresh=False)
    bar.update(sum(update.finish is not None for update in updates))


@torch.inference_mode(False)
def _call_back(on_update: Callable[[Update], None], updates: Sequence[Update], interrupts: Interrupts) -> None:
    for update in updates:
        with interrupts.allowed():
            on_update(update)


RENAMED = {
    "block_size": "page_size",
    "enable_prefix_caching": "prefix_caching",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_pages",
}
BLOCK_SIZE = 16
"""vLLM's default, for ``enable_prefix_caching`` without a block size."""

_ONE = ((1,), "the layers' parts are split by tensor_parallel_size; forerun serve --replicas starts several engines")
WITHOUT_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    "pipeline_parallel_size": _ONE,
    "data_parallel_size": _ONE,
    "trust_remote_code": ((False,), "remote code never runs: the model must be one that transformers knows"),
    "swap_space": ((0, 0.0), "nothing is swapped: requests that lose their pages are computed again"),
    "cpu_offload_gb": ((0, 0.0), "weights are on one device: use device='cpu' or quantization"),
    "enable_chunked_prefill": ((True,), "prompts are always read in chunks: max_num_batched_tokens bounds them"),
    "disable_log_stats": ((True,), "nothing is logged: figures are in each output's metrics"),
    "kv_cache_dtype": (("auto",), "the KV cache has the model's dtype"),
    "load_format": (("auto", "safetensors"), "only safetensors and GGUF are read"),
    "tokenizer_mode": (("auto",), "the checkpoint's own tokenizer is used"),
    "skip_tokenizer_init": ((False,), "a tokenizer is always loaded; prompts may be token ids all the same"),
    "scheduling_policy": (("fcfs", "priority"), "requests come in the order of arrival, moved by their priority"),
    "task": (("auto", "generate"), "models generate here"),
    "runner": (("auto", "generate"), "models generate here"),
    "tokenizer_revision": ((None,), "give revision, or the folder of a tokenizer as tokenizer"),
}
"""vLLM's options with the values that change nothing here, and a hint for other values."""
INSTEAD = {
    "speculative_model": "speculative_config={'model': ..., 'num_speculative_tokens': ...}",
    "num_speculative_tokens": "speculative_config={'method': ..., 'num_speculative_tokens': ...}",
    "max_seq_len_to_capture": "remove it: CUDA graphs are captured on demand",
    "compilation_config": "remove it: kernels are compiled on demand",
    "distributed_executor_backend": "remove it: tensor_parallel_size starts its own processes",
    "guided_decoding_backend": "remove it: the backend is llguidance",
    "max_logprobs": "remove it: logprobs has no limit",
    "hf_overrides": "change config.json in a copy of the checkpoint",
    "limit_mm_per_prompt": "remove it: prompts are text",
    "served_model_name": "forerun serve --served-model-name",
    "chat_template": "forerun serve --chat-template",
}


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translates keywords of ``LLM``, vLLM's among them, to options of ``EngineConfig``.

    With a ``revision`` or a ``download_dir``, ``model`` becomes the folder of the download. Raises ConfigError for an
    option that cannot be honoured, ModelError for a download that fails.
    """
    result: dict[str, Any] = {}
    for name, value in options.items():
        if name in WITHOUT_EFFECT:
            accepted, instead = WITHOUT_EFFECT[name]
            if not any(value is each or (value == each and type(value) is type(each)) for each in accepted):
                raise ConfigError(f"{name}={value!r} is not supported: {instead}")
            continue
        if name in INSTEAD:
            raise ConfigError(f"{name} is not supported; use instead: {INSTEAD[name]}")
        name = RENAMED.get(name, name)
        if name in result:
            raise ConfigError(f"{name} is set twice, once by vLLM's name: {result[name]!r} and {value!r}")
        result[name] = value
    if result.get("prefix_caching") is True and "enable_prefix_caching" in options:
        result.setdefault("page_size", BLOCK_SIZE)
    revision, folder = result.pop("revision", None), result.pop("download_dir", None)
    if revision is not None or folder is not None:
        result["model"] = str(resolve(result["model"], revision=revision, download_dir=folder))
    return result


class Interrupts:
    """Defers the main thread's SIGINT while entered: to ``deliver``, to ``allowed`` code or to the end.

    The signal then goes to the previous handler, which raises KeyboardInterrupt unless the program has set another.
    In other threads it does nothing, because they get no signals.
    """

    def __init__(self) -> None:
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._allowed = False
        self._pending = False

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self.deliver()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._pending = True
        if self._allowed:
            self.deliver(frame)

    def deliver(self, frame: FrameType | None = None) -> None:
        """Passes on a signal that has come meanwhile."""
        if self._pending and self._previous is not None:
            self._pending = False
            self._previous(signal.SIGINT, frame)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Signals take effect at once inside, as in the caller's own code."""
        self._allowed = True
        try:
            yield
        finally:
            self._allowed = False
