"""``forerun tune`` in stages: write text, train drafts, choose the fastest drafter, check it.

Each stage saves its result, so that the same command continues a run.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from forerun.core.errors import ConfigError, one_line
from forerun.engine import tuned
from forerun.engine.auto import known_drafter
from forerun.engine.llm import LLM
from forerun.models.files.open import Checkpoint
from forerun.models.formats import int8
from forerun.speculate.draft import datastore, drafters
from forerun_lab.tune import choose, loop
from forerun_lab.tune.choose import page
from forerun_lab.tune.config import SHARES, TEXTS, LoopSettings, TuneConfig
from forerun_lab.tune.data import Data, read
from forerun_lab.tune.features import ROWS, Features, HiddenStateRecorder, Writer, save_part
from forerun_lab.tune.kinds import (
    LENGTH,
    LOSS_LABEL,
    PARALLEL_DEPTH,
    HeadKind,
    Trainer,
    draft_vocabulary,
    feature_layers,
    read_start,
    save_start,
)
from forerun_lab.tune.more_kinds import KINDS
from forerun_lab.tune.progress import progress
from forerun_lab.tune.state import TuneState, load_target

VERSION = 3
"""Version of the files in ``run``."""
BATCH = 4096
"""Tokens of a training step."""
PROGRAM_BYTES = 0.7e9
"""Memory of Python, torch and transformers without a model."""
HELD_OUT_SHARE = 0.15
"""Largest fraction of the written text that is held out, at two temperatures."""
FIT_TOKENS = 200_000
"""Tokens that an initialisation is fitted to, at most."""
REPORT = "report.html"
BUNDLED = "bundled"
"""The copy of the model's bundled head, in a tuned folder."""


def tune(config: TuneConfig, say: Callable[[str], None] = lambda line: None) -> Path:
    """Run every stage that has not been run yet; returns the folder. Raises ForerunError subclasses."""
    if config.threads:
        torch.set_num_threads(config.threads)
    config = replace(config, out=config.out.absolute())  # the chosen config names it, and is saved
    data = read(config.data)
    opened = Checkpoint.open(config.model)
    opened.require_decoder("forerun tune")
    for name in config.train:
        KINDS[name].require(opened.transformers_config().get_text_config())
    marks = {
        "version": VERSION,
        "model": opened.fingerprint(),
        "data": hashlib.sha256(json.dumps([data.turns, data.paragraphs]).encode()).hexdigest()[:16],
        "quantization": config.quantization,
        "rows": config.rows,
        "seed": config.seed,
        "training": "some" if config.train else "none",
        "text": None if config.text is None else hashlib.sha256(config.text.read_bytes()).hexdigest()[:16],
    }
    run = config.out / "run"
    state = TuneState(run, marks)
    if state.results.get("alone", {}).get("asked", _time_options(config)) != _time_options(config):
        state.forget("alone", "held", "choose", "check")
    known = _known(config)
    if "write" not in state.results and "alone" not in state.results:
        _write(config, data, state, run, say)
    if "alone" in state.results:
        say(state.results["alone"]["why"])
        config = replace(config, train=(), cpu_minutes=None)
    elif state.lacking(config.train):
        _train(config, opened, state, run, say)
    compared = [list(config.train), str(config.out), known]
    if state.results.get("compared") != compared:
        state.forget("choose", "check")
        state.keep("compared", compared)
    llm, held = _load(config), state.results["held"]
    if "choose" not in state.results:
        with state.stage("choose"):
            result = choose.choose(
                llm, _drafts(config, llm), known, _texts(config, run), held[: config.probe], config.probe_tokens,
                SHARES["choose"] * config.seconds, config.progress,
            )  # fmt: skip
            state.keep("choose", result)
    if "check" not in state.results:
        with state.stage("check"):
            drafts = {path: path for path in [_known_draft(known)] if path}
            chosen = tuned.placed(state.results["choose"]["chosen"], config.out, drafts)
            state.keep("check", choose.check(llm, chosen, held, config.probe_tokens, config.progress))
    llm.close()
    return _finish(config, state, known, say)


def _known(config: TuneConfig) -> dict[str, Any] | None:
    """The drafter that Forerun knows for the model. A bundled head is copied into the folder."""
    known = known_drafter(config.model)
    if known and "model" in known and not _known_draft(known):
        shutil.copytree(known["model"], config.out / BUNDLED, dirs_exist_ok=True)
        known["model"] = str(config.out / BUNDLED)
    return known and {key: value for key, value in known.items() if key != "length"}


def _known_draft(known: Mapping[str, Any] | None) -> str | None:
    """The path of a draft model that lies outside of the folder."""
    return known.get("model") if known and known["method"] == "draft_model" else None


def _drafts(config: TuneConfig, llm: LLM) -> list[dict[str, Any]]:
    """``speculative_config`` of each trained draft."""
    able = int8.has_kernels(llm.model.info.device, llm.model.info.dtype)
    return [
        {"method": name, "model": str(config.out / name)} | ({"quantization": KINDS[name].quantization} if able else {})
        for name in config.train
    ]


def _texts(config: TuneConfig, run: Path) -> Path | None:
    """The datastore of the model's answers; None if it wrote none."""
    if config.text is not None:
        return Path(shutil.copyfile(config.text, config.out / TEXTS))
    answers = list(Features(run / "text").answers()) if (run / "text").is_dir() else []
    if not answers:
        return None
    datastore.save(config.out / TEXTS, answers)
    return config.out / TEXTS


def _load(config: TuneConfig, **more: Any) -> LLM:
    return LLM(
        config.model,
        quantization=config.quantization,
        threads=torch.get_num_threads(),
        **{"speculative_config": None, **more},
    )


def _write(config: TuneConfig, data: Data, state: TuneState, run: Path, say: Callable[[str], None]) -> None:
    """Stage 1: the model writes text, or reads given text, for its fraction of the time. If the time is too short for
    training, it writes nothing, and the result ``alone`` says so."""
    text = Checkpoint.open(config.model).transformers_config().get_text_config()
    layers = feature_layers(text) if config.train else []
    longest = min(config.answer + 704, text.max_position_embeddings)
    recording = {"method": HiddenStateRecorder.name, "layers": layers}
    with drafters.lent(HiddenStateRecorder.name, HiddenStateRecorder):
        llm = _load(config, max_model_len=longest, max_num_seqs=ROWS, speculative_config=recording)
    record = llm.engine.router.drafters[HiddenStateRecorder.name]
    assert isinstance(record, HiddenStateRecorder)
    writer = Writer(llm, record, data, answer=config.answer, prompt=longest - config.answer)
    held_out = writer.held_out_prompts()
    budget = config.writing * config.seconds
    token_bytes = 2 * len(layers) * text.hidden_size + 4
    given = _given_answers(config, llm)
    asked = _time_options(config)
    with state.stage("load"):
        planned = state.results.get("planned", {}).get(str(asked))  # what was decided before an interruption holds
        if planned is None:
            planned = writer.tokens_to_read(given) if given else round(writer.speed(held_out) * budget)
            planned = min(config.max_tokens, planned)
            state.keep("planned", {str(asked): planned})
    if not held_out:
        raise ConfigError(f"an answer of {config.answer} tokens leaves no room for a prompt: lower --answer")
    too_little = bool(config.train) and planned < min(config.min_tokens, config.max_tokens)
    alone = too_little and not any((run / "text").glob("*.pt"))
    if alone and given:
        raise ConfigError(
            f"{config.text} makes {planned:,} tokens to read, and from fewer than {config.min_tokens:,} (--min-tokens) "
            "nothing learns to draft well enough to pay: give more, or let the model write"
        )
    if "held" not in state.results:
        share = round(HELD_OUT_SHARE * planned / (2 * config.answer))
        count = config.probe if alone else max(choose.FIRST_PROMPTS, share)
        state.keep("held", held_out[:: -(-len(held_out) // count)])
    if alone:
        llm.close()
        state.keep("alone", {"asked": asked, "why": _too_little(config, planned)})
        return
    memory = _memory(llm, longest, text, config.rows, bool(config.train))
    _announce(config, run, planned, planned * token_bytes, memory, say)
    (run / "held").mkdir(exist_ok=True)
    (run / "text").mkdir(exist_ok=True)
    with state.stage("write"):
        if config.train and not (run / "held" / "held.pt").exists():
            save_part(writer.held_out_part(state.results["held"]), run / "held" / "held.pt")
    total = 0
    title = "reading text, tokens" if given else "writing text, seconds"
    with progress(title, planned if given else round(budget), config.progress) as bar:
        for number in range(1_000_000):
            path = run / "text" / f"{number:05d}.pt"
            if not path.exists():
                answers = given[number * ROWS : (number + 1) * ROWS]
                over = (number and state.seconds["write"] >= budget) or (given and not answers)
                if over or total >= config.max_tokens:
                    break
                with state.stage("write"):
                    seed = config.seed * 1_000_003 + number
                    save_part(writer.read_part(answers) if given else writer.write_part(seed, float(number % 2)), path)
            total += int(torch.load(path, mmap=True, weights_only=True)["lengths"].sum())
            bar.update(total if given else round(state.seconds.get("write", 0)), "" if given else f"{total:,} tokens")
    llm.close()
    state.keep("write", {"tokens": total, "bytes": total * token_bytes, "chats": writer.chats})


def _given_answers(config: TuneConfig, llm: LLM) -> list[list[int]]:
    """The answers in ``config.text``, shuffled; none without a text. Raises ConfigError for another model's text."""
    if config.text is None:
        return []
    try:
        answers = [answer.tolist() for answer in datastore.read(config.text) if len(answer) >= PARALLEL_DEPTH]
    except (OSError, SafetensorError, TypeError) as error:  # of another file, or of numbers that numpy has not
        raise ConfigError(f"cannot read {config.text}: {one_line(error)}") from error
    if not 0 <= min(map(min, answers), default=-1) <= max(map(max, answers), default=-1) < llm.model.info.vocab_size:
        raise ConfigError(
            f"{config.text} holds no text of this model: none of at least {PARALLEL_DEPTH} tokens, "
            "or with tokens it has not"
        )
    random.Random(config.seed).shuffle(answers)
    return answers


def _time_options(config: TuneConfig) -> list[float]:
    """The options that decide whether there is time to train."""
    return [config.hours, config.min_tokens, config.max_tokens, config.answer]


def _too_little(config: TuneConfig, planned: int) -> str:
    """The message for a time that is too short for training."""
    enough = config.hours * config.min_tokens / max(1, planned)
    known = known_drafter(config.model)
    others = f", and the {known['method']} that Forerun knows for this model," if known else ""
    return (
        f"{config.hours * 60:.1f} minutes are too few: the model would write about {planned:,} tokens, and from fewer "
        f"than {config.min_tokens:,} (--min-tokens) nothing learns to draft well enough to pay (figures: "
        "docs/tune.md). So nothing is trained: drafters that copy from the text so far "
        f"({', '.join(way['method'] for way in choose.HISTORY)}){others} are measured, and the quickest is kept. "
        f"Copies bring much where answers repeat, little elsewhere. About --hours {enough:.2g} would train"
    )


def _memory(llm: LLM, longest: int, config: Any, rows: int, learns: bool) -> float:
    """Estimated bytes of memory, the larger of two stages. Writing takes the weights and the cache of ``ROWS`` texts.
    Training takes the target in bfloat16, three layers with gradient and momentum, least squares, and logits over the
    whole vocabulary and over the draft's, ``rows``."""
    info = llm.model.info
    entries = sum(shape.numbers for shape in info.kv_shapes)
    writing = info.weight_bytes + ROWS * longest * entries * info.dtype.itemsize
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config)
    layer = sum(part.numel() for part in target.get_decoder().layers[0].parameters())
    inner = getattr(config, "intermediate_size", 0)
    training = 2 * target.num_parameters() + 48 * layer + 20 * inner**2
    training += 24 * LENGTH * info.vocab_size + 27 * PARALLEL_DEPTH * BATCH * rows
    return float(PROGRAM_BYTES + max(writing, training if learns else 0))


def _announce(
    config: TuneConfig, run: Path, planned: int, disk: int, memory: float, say: Callable[[str], None]
) -> None:
    """Print what the run will do and need, in bytes of ``disk`` and ``memory``. Raises ConfigError if the disk is too
    full."""
    free = shutil.disk_usage(run).free
    drafts, learning = " and ".join(config.train), f"{config.learning:.0%}"
    if config.text is not None:
        work = f"{learning} to read about {planned:,} tokens and to train {drafts}, "
    else:
        work = f"{config.writing:.0%} to write text, about {planned:,} tokens, "
        work += f"{learning} to train {drafts}, " if drafts else ""
    say(
        f"{config.hours * 60:.3g} minutes: {work}"
        f"the rest to choose and to check; about {memory / 1e9:.1f} GB of memory, and {disk / 1e9:.1f} GB of disk in "
        f"{run}, to be removed afterwards"
    )
    if free < disk + (1 << 28):
        raise ConfigError(
            f"{run} has {free / 1e9:.1f} GB free, and {planned:,} tokens of text take {disk / 1e9:.1f} GB: free some, "
            "or lower --max-tokens"
        )


def _train(config: TuneConfig, opened: Checkpoint, state: TuneState, run: Path, say: Callable[[str], None]) -> None:
    """Stage 2: initialise each draft from the target and train it for its fraction of the time; the better of both is
    kept."""
    target, tokenizer = load_target(opened.path)
    train, test = Features(run / "text", config.seed), Features(run / "held")
    if not train.spans or not test.spans:
        raise ConfigError("the model ended every text at once: there is nothing to learn from")
    ids = draft_vocabulary(target, train, config.rows)
    trainer = Trainer(target, train, test, ids)
    metadata = {"target": config.model, "target_fingerprint": opened.fingerprint()}
    clock = time.process_time if config.cpu_minutes else time.monotonic
    for name in state.lacking(config.train):
        first, kind = run / f"{name}.pt", KINDS[name]
        with state.stage(f"train {name}"):
            say(f"{name}: from what the target knows")
            if first.exists() and f"{name} fitted" in state.results:
                draft = read_start(kind, first, target)
            else:
                began = clock()
                draft = kind.fitted(target, train, ids, FIT_TOKENS)
                seconds = clock() - began
                save_start(draft, first)
                state.keep(f"{name} fitted", {**loop.evaluated(trainer.evaluate, draft), "seconds": seconds})
            fitted = state.results[f"{name} fitted"]
            seconds = max(1.0, _draft_seconds(config, state) - fitted["seconds"])
            settings = _settings(config, kind, seconds, run / f"training {name}")
            done = loop.run(draft, train, trainer.loss, settings, trainer.evaluate, LOSS_LABEL)
            learnt = done.figures or loop.evaluated(trainer.evaluate, draft)
            better = sum(learnt["accepted_at_0"]) >= sum(fitted["accepted_at_0"])
            if not better:
                draft = read_start(kind, first, target)
            kind.export(draft, config.out / name, tokenizer, {**metadata, "tokens": done.tokens})
            figures = {"tokens": done.tokens, "seconds": fitted["seconds"] + done.seconds, "learnt": learnt}
            state.trained(name, {**figures, "fitted": fitted, "kept": "learnt" if better else "fitted"})


def _draft_seconds(config: TuneConfig, state: TuneState) -> float:
    """Training time of each draft."""
    if config.cpu_minutes:
        return 60 * config.cpu_minutes
    read = state.seconds["write"] if config.text is not None else 0.0
    return (config.learning * config.seconds - read) / len(config.train)


def _settings(config: TuneConfig, kind: HeadKind, seconds: float, out: Path) -> LoopSettings:
    return LoopSettings(
        out=out, tokens=config.max_tokens, seconds=seconds, cpu_time=config.cpu_minutes is not None, batch_tokens=BATCH,
        micro_tokens=BATCH, length=LENGTH, long_length=LENGTH, long_share=0.0, matrix_lr=kind.matrix_lr, lr=kind.lr,
        weight_decay=0.0, warmup_share=0.05, decay_share=0.5, seed=config.seed, threads=config.threads,
        eval_tokens=20 * BATCH, checkpoint_seconds=60.0, progress=config.progress,
    )  # fmt: skip


def _finish(config: TuneConfig, state: TuneState, known: Mapping[str, Any] | None, say: Callable[[str], None]) -> Path:
    """Write the report and ``tuned.json``, whose paths are relative. Raises ConfigError if a token differs."""
    result, checked = state.results["choose"], state.results["check"]
    if not checked["passed"]:
        raise ConfigError(f"{config.out}: speculation changed {checked['different']} answers; nothing is recommended")
    chosen = result["chosen"]
    text, files = json.dumps(chosen), []
    for name in (*config.train, BUNDLED, TEXTS):
        path = json.dumps(str(config.out / name))
        if path in text:
            text = text.replace(path, json.dumps(name))
            parts = sorted((config.out / name).iterdir()) if name != TEXTS else [config.out / name]
            files += [str(part.relative_to(config.out)) for part in parts]
    (config.out / REPORT).write_text(page(config.model, state), encoding="utf-8")
    tuned.save(
        config.out, config.model, json.loads(text), files, draft=_known_draft(known), figures=result["measured"],
        accepted=state.results.get("train", {}),
    )  # fmt: skip
    say(choose.verdict(result, trained=bool(config.train)))
    say(f"{config.out}: use it with --tuned {config.out}, or LLM({config.model!r}, tuned={str(config.out)!r})")
    return config.out
