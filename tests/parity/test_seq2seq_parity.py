"""Encoder-decoders against transformers itself: T5, Flan-T5, mT5 and BART shapes, ragged sources in one batch."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from forerun import LLM, BeamSearchParams, SamplingParams
from forerun.core.batch import Span
from forerun.core.errors import ConfigError, ModelError
from forerun.engine.config import EngineConfig, SpeculativeConfig
from forerun.engine.engine import Engine
from forerun.models.formats.tiled import can_tile
from forerun.models.load import load_model
from forerun.models.run.base import new_attention
from forerun.sampling.noise import Gumbel, target_key
from here import where
from modules import check_chunks_and_trees, feed
from refusals import refused
from rounding import by_chance
from tiny import ALPHABET
from tiny_seq2seq import EOS, FORCED, KINDS, START, reference, save_seq2seq, some_tokens, theirs

SOURCES = [some_tokens(length, seed=length) for length in (60, 1, 23, 7, 40)]


@pytest.fixture(params=[*KINDS])
def folder(request, seq2seq):
    return seq2seq(request.param)


def close(got, expected, tolerance=2e-4):
    assert got.shape == expected.shape
    assert expected.std() > 0.1
    assert (got - expected).abs().max() <= tolerance


@pytest.mark.parametrize("page_size", [None, 16])
def test_logits_of_chunks_batches_and_trees(folder, page_size, cpu_attention):
    model = load_model(folder, invariant=False)
    sources = [tuple(source) for source in SOURCES[:2]]
    texts = some_tokens(40), some_tokens(33, seed=1)
    attention = new_attention(model, max_seqs=2, max_len=64, page_size=page_size)
    check_chunks_and_trees(
        model, attention, texts, lambda index, tokens: reference(folder, SOURCES[index], tokens), close, sources
    )


def answers(folder, params, config=None, **options):
    engine = Engine(
        load_model(folder), None, EngineConfig(max_model_len=100, **options), SpeculativeConfig.parse(config)
    )
    jobs = [engine.add(source, each)[0] for source, each in zip(SOURCES, params)]
    while engine.busy:
        engine.step()
    engine.check()
    return [job.output_ids for job in jobs]


def test_sampled_tokens_are_the_best_of_transformers_logits_and_the_noise(folder):
    temperature, noise = 0.9, Gumbel(len(ALPHABET))
    params = [SamplingParams(temperature=temperature, max_tokens=32, ignore_eos=True, seed=seed) for seed in range(5)]
    for source, each, result in zip(SOURCES, params, answers(folder, params, {"method": "ngram"})):
        logits = reference(folder, source, [START, *result])
        for index, token in enumerate(result):
            scores = logits[index] / temperature + noise.rows([target_key(each.seed, 1 + index)])[0]
            assert scores[token] > scores.max() - 1e-3


def test_an_answer_ends_where_transformers_ends_it(folder):
    """EOS, likely enough to come: an answer of transformers' ends with it, or is as long as it may be."""
    bias = {EOS: 0.7 * reference(folder, SOURCES[0], [START]).std().item()}
    params = [SamplingParams(temperature=0, max_tokens=40, logit_bias=bias)] * len(SOURCES)
    result = answers(folder, params)
    for source, answer in zip(SOURCES, result):
        logits = reference(folder, source, [START, *answer])[: len(answer)].clone()
        logits[:, EOS] += bias[EOS]
        assert logits.argmax(dim=1).tolist() == answer
        assert EOS not in answer[:-1]
        assert answer[-1] == EOS or len(answer) == 40
    assert any(answer[-1] == EOS for answer in result)


def test_what_the_decoder_begins_with(tmp_path):
    """As transformers: the generation config's start token, and one that is forced behind it."""
    save_seq2seq("bart", tmp_path)
    path = tmp_path / "generation_config.json"
    given = json.loads(path.read_text())
    assert load_model(tmp_path).info.encoder.start == (START,)
    path.write_text(json.dumps({**given, "forced_bos_token_id": FORCED}))
    assert load_model(tmp_path).info.encoder.start == (START, FORCED)
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * len(SOURCES)
    model = theirs(str(tmp_path))
    for source, result in zip(SOURCES, answers(str(tmp_path), params)):
        answer = model.generate(torch.tensor([source]), max_new_tokens=13, do_sample=False, eos_token_id=None)
        assert answer[0].tolist() == [START, FORCED, *result]
    path.write_text(json.dumps({**given, "decoder_start_token_id": 98}))
    refused(ModelError, "does not say what its decoder begins with: token id 98", load_model, tmp_path)


def test_relative_positions_have_no_end(seq2seq):
    """512 of them unless more are asked for; learned ones are as many as there are."""
    assert load_model(seq2seq("t5")).info.max_len == 512
    assert load_model(seq2seq("t5"), max_model_len=700).info.max_len == 700
    assert load_model(seq2seq("bart"), max_model_len=700).info.max_len == 128
    folder, source, tokens = seq2seq("mt5"), some_tokens(600, 8), some_tokens(590, 9)
    model = load_model(folder, max_model_len=700)
    attention = new_attention(model, max_seqs=1, max_len=700)
    close(feed(model, attention, Span(0, 0, tokens, source=tuple(source))), reference(folder, source, tokens))


def test_half_precision(folder):
    kinds = ["bfloat16"] if "bart" not in folder else ["bfloat16", "float16"]
    source, tokens = SOURCES[2], some_tokens(30, 4)
    for kind in kinds:
        model = load_model(folder, dtype=kind)
        got = feed(model, new_attention(model, max_seqs=1, max_len=64), Span(0, 0, tokens, source=tuple(source)))
        expected, usual = (reference(folder, source, tokens, dtype) for dtype in (torch.float32, getattr(torch, kind)))
        assert (got - expected).norm() < by_chance(len(tokens)) * (usual - expected).norm()
    if len(kinds) == 1:
        refused(ConfigError, "overflows float16", load_model, folder, dtype="float16")


def test_equal_bits_are_promised_only_where_our_kernels_compute_them(folder):
    refused(ConfigError, "remove invariant", load_model, folder, weights="plain", invariant=True)
    with pytest.warns(RuntimeWarning, match="invariant mode is off"):
        model = load_model(folder, weights="plain", invariant=None)
    assert not model.invariant
    assert not Engine(model, None, EngineConfig()).identity


@pytest.mark.parametrize("kind", where(can_tile(torch.float32), ["int8_rows", "q8_0"]))
def test_quantized(folder, kind):
    """And bit-equal all the same."""
    source, tokens = SOURCES[2], some_tokens(30, 4)
    model = load_model(folder, quantization=kind, invariant=True)
    got = feed(model, new_attention(model, max_seqs=1, max_len=64), Span(0, 0, tokens, source=tuple(source)))
    expected = reference(folder, source, tokens)
    assert 0 < (got - expected).norm() < 0.25 * expected.norm()


DAMAGED = [
    ("t5", {"num_decoder_layers": 0}), ("t5", {"d_ff": -1}), ("t5", {"relative_attention_num_buckets": 2}),
    ("flan", {"dense_act_fn": "nothing"}), ("flan", {"dense_act_fn": "tanh"}),
    ("mt5", {"num_heads": 5}), ("mt5", {"vocab_size": 1 << 40}), ("mt5", {"num_layers": 3}),
    ("bart", {"decoder_attention_heads": 8}), ("bart", {"encoder_attention_heads": 0}), ("bart", {"decoder_layers": 3}),
    ("bart", {"max_position_embeddings": 8}), ("bart", {"model_type": "mbart"}), ("bart", {"activation_function": "x"}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change"), DAMAGED, ids=str)
def test_what_cannot_be_run_is_refused_in_one_line(seq2seq, tmp_path, kind, change):
    folder = Path(shutil.copytree(seq2seq(kind), tmp_path / "copy"))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    refused(ModelError, None, load_model, folder)


@pytest.mark.parametrize("drafting", [None, {"method": "ngram"}, {"method": "draft_model"}], ids=str)
def test_beams_of_transformers(folder, drafting):
    """The same beams in the same order, of ragged sources in one call; those of a request read one source."""
    if drafting == {"method": "draft_model"}:
        drafting = {**drafting, "model": folder}
    llm = LLM(folder, speculative_config=drafting, page_size=8, max_model_len=100)
    prompts = [{"prompt_token_ids": source} for source in SOURCES[:3]]
    result = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=16), use_tqdm=False)
    for source, output in zip(SOURCES, result):
        expected = theirs(folder).generate(
            torch.tensor([source]), max_new_tokens=16, num_beams=3, num_return_sequences=3, do_sample=False,
            use_cache=False, early_stopping=False,
        )  # fmt: skip
        for beam, row in zip(output.sequences, expected.tolist(), strict=True):
            assert row[: len(beam.tokens)] == beam.tokens
            rest = row[len(beam.tokens) :]
            assert rest[:1] in ([], [EOS])
            assert set(rest[1:]) <= {START}
    llm.engine.check()


def test_a_forced_end_is_transformers_own_and_all_else_is_the_same(seq2seq, tmp_path):
    """``forced_eos_token_id`` takes the last place of an answer that reaches its limit; here the model has it."""
    folder = shutil.copytree(seq2seq("bart"), tmp_path / "forced")
    path = folder / "generation_config.json"
    habits = {"forced_bos_token_id": FORCED, "forced_eos_token_id": EOS}
    path.write_text(json.dumps(json.loads(path.read_text()) | habits))
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * len(SOURCES)
    for source, result in zip(SOURCES, answers(str(folder), params)):
        expected = theirs(str(folder)).generate(
            torch.tensor([source]), attention_mask=torch.ones(1, len(source), dtype=torch.long), max_new_tokens=13,
            do_sample=False, use_cache=False, eos_token_id=None,
        )[0].tolist()  # fmt: skip
        assert expected[:2] == [START, FORCED]
        assert expected[-1] == EOS != result[-1]
        assert expected[2:-1] == result[:-1]
