"""Beam search against transformers' own, on random checkpoints, whatever drafts."""

from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from forerun import LLM, BeamSearchParams
from modules import randomise
from tiny import save_checkpoint

VOCABULARY = 98
ENDS = [0, 9, 23, 41, 60, 77]
"""So many that beams of a random model end at different lengths."""
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": ENDS, "pad_token_id": 0,
}  # fmt: skip
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
ARCHITECTURES = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "gemma2": ("gemma2", WINDOWED),
    "gemma3": ("gemma3_text", WINDOWED),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_neox": ("gpt_neox", {}),
}
NEW = 11
PROMPTS = [[5, 7, 11, 20, 30, 44, 8, 3], [50], [61, 62, 63, 64, 13]]
SETTINGS = [
    BeamSearchParams(1, NEW, include_stop_str_in_output=True),
    BeamSearchParams(2, NEW, include_stop_str_in_output=True, length_penalty=0.0, early_stopping=True),
    BeamSearchParams(3, NEW, include_stop_str_in_output=True, length_penalty=2.5, early_stopping="never"),
    BeamSearchParams(4, NEW, include_stop_str_in_output=True),
    BeamSearchParams(5, NEW, include_stop_str_in_output=True, length_penalty=-1.5, early_stopping="never"),
    BeamSearchParams(6, NEW, include_stop_str_in_output=True, length_penalty=-0.7, num_return_sequences=2),
    BeamSearchParams(7, NEW, include_stop_str_in_output=True, length_penalty=1.7, early_stopping=True),
    BeamSearchParams(8, NEW, ignore_eos=True, length_penalty=0.6, num_return_sequences=5),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    @cache
    def get(name):
        kind, options = ARCHITECTURES[name]
        torch.manual_seed(1)
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **options}))
        randomise(module, 0.2, 0.0 if "gemma" in name else 1.0)
        module.generation_config.eos_token_id = ENDS
        return save_checkpoint(module, tmp_path_factory.mktemp(name))

    return get


def theirs(model, params):
    """Each prompt's beams, as tokens and score, all prompts in one padded batch."""
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    result = model.generate(
        ids, attention_mask=mask, num_beams=params.beam_width, num_return_sequences=params.n, do_sample=False,
        max_new_tokens=params.max_tokens, pad_token_id=0, eos_token_id=None if params.ignore_eos else ENDS,
        return_dict_in_generate=True, output_scores=True,
        **({} if params.beam_width == 1 else
           {"length_penalty": params.length_penalty, "early_stopping": params.early_stopping}),
    )  # fmt: skip
    scores = [0.0] * len(result.sequences) if params.beam_width == 1 else result.sequences_scores.tolist()
    beams = []
    for index, (row, score) in enumerate(zip(result.sequences.tolist(), scores)):
        tokens = row[longest:]
        end = next((slot for slot, token in enumerate(tokens) if token in ENDS), len(tokens) - 1)
        answer = tokens if params.ignore_eos else tokens[: end + 1]
        beams.append((PROMPTS[index // params.n] + answer, score))
    return [beams[first : first + params.n] for first in range(0, len(beams), params.n)]


def agree(result, expected):
    for ours, beams in zip(result, expected, strict=True):
        assert [sequence.tokens for sequence in ours.sequences] == [tokens for tokens, _ in beams]
        for sequence, (_, score) in zip(ours.sequences, beams):
            assert score == 0.0 or sequence.score == pytest.approx(score, abs=2e-4, rel=2e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_beams_scores_and_their_order(folder, name):
    path = folder(name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    shape = {"tree": [3, 2, 1]} if name == "gpt_neox" else {"num_speculative_tokens": 3}
    speculative = {"method": "draft_model", "model": path, **shape}
    llm = LLM(path, speculative_config=speculative, max_num_seqs=9, page_size=4, invariant=name != "mixtral")
    ended = rounds = steps = 0
    for params in SETTINGS:
        result = llm.beam_search([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
        agree(result, theirs(model, params))
        ended += sum(sequence.finish_reason == "stop" for ours in result for sequence in ours.sequences)
        rounds += sum(ours.metrics.rounds for ours in result)
        steps += sum(ours.metrics.decode_tokens for ours in result)
    llm.engine.check()
    assert ended > 2
    assert steps > 1.5 * rounds
