"""Blocks filled in one pass: what is drafted, and the distribution it is drawn from, are those of a dense float64
computation out of the files' own tensors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from drafting import drafts_of, first_draft
from forerun import LLM, ForerunError, SamplingParams
from forerun.models.files.open import Checkpoint
from refusals import refused

PROMPT = [5, 9, 12, 7, 7, 3, 5, 9, 12, 11, 4]
HEADS, KV_HEADS, WIDTH, INNER, LAYERS, MASK, RANK = 4, 2, 16, 24, 2, 1, 8
BLOCK = 5
FROM_ANCHOR = ("dspark", "domino-shifted")
"""Kinds whose rows predict the next position's token."""


def random_weights(size, vocabulary, taps, kind, seed=0):
    """A checkpoint's tensors by the names that z-lab's files have."""
    g = torch.Generator().manual_seed(seed)

    def r(*shape, scale=0.3, mean=0.0):
        return torch.randn(*shape, generator=g) * scale + mean

    w = {"fc.weight": r(size, taps * size), "hidden_norm.weight": r(size, mean=1.0), "norm.weight": r(size, mean=1.0)}
    for i in range(LAYERS):
        at, attention, wide, narrow = f"layers.{i}.", f"layers.{i}.self_attn.", HEADS * WIDTH, KV_HEADS * WIDTH
        w |= {f"{at}input_layernorm.weight": r(size, mean=1.0), f"{attention}q_proj.weight": r(wide, size),
              f"{attention}k_proj.weight": r(narrow, size), f"{attention}v_proj.weight": r(narrow, size),
              f"{attention}o_proj.weight": r(size, wide), f"{at}post_attention_layernorm.weight": r(size, mean=1.0),
              f"{attention}q_norm.weight": r(WIDTH, mean=1.0), f"{attention}k_norm.weight": r(WIDTH, mean=1.0),
              f"{at}mlp.gate_proj.weight": r(INNER, size), f"{at}mlp.up_proj.weight": r(INNER, size),
              f"{at}mlp.down_proj.weight": r(size, INNER)}  # fmt: skip
        if kind == "dflash2":
            for part in ("attention_conv", "mlp_conv"):
                w[f"{at}{part}.base_kernel"] = r(2, 2, size, mean=0.5)
                w[f"{at}{part}.kernel_projection.weight"] = r(2 * 2 * size // 16, size, scale=0.1)
    if kind == "dflash2":
        at = "candidate_selector."
        w |= {f"{at}hidden_projection.weight": r(RANK, size), f"{at}predecessor_codebook": r(vocabulary, RANK),
              f"{at}successor_codebook": r(vocabulary, RANK)}  # fmt: skip
    if kind == "dspark":
        w |= {"markov_head.markov_w1.weight": r(vocabulary, RANK), "markov_head.markov_w2.weight": r(vocabulary, RANK),
              "confidence_head.proj.weight": r(1, size + RANK), "confidence_head.proj.bias": r(1),
              "embed_tokens.weight": r(vocabulary, size), "lm_head.weight": r(vocabulary, size)}  # fmt: skip
    if kind.startswith("domino"):
        w |= {"prefix_gru.weight_ih_l0": r(3 * RANK, size), "prefix_gru.weight_hh_l0": r(3 * RANK, RANK),
              "embed_proj.0.weight": r(INNER, size + RANK), "embed_proj.2.weight": r(vocabulary, INNER)}  # fmt: skip
    return w


def config_of(target, kind, **more):
    text = Checkpoint.at(Path(target)).config.get_text_config()
    config = {
        "hidden_size": text.hidden_size, "vocab_size": text.vocab_size, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "rms_norm_eps": 1e-6, "rope_theta": 1000.0, "block_size": BLOCK,
        "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": MASK},
    }  # fmt: skip
    if kind == "dflash2":
        config["dflash_config"] |= {
            "selector_top_k": 6,
            "selector_rank": RANK,
            "conv_group_size": 16,
            "conv_kernel_size": 2,
        }
    if kind == "dspark":
        config |= {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
    if kind.startswith("domino"):
        config["dflash_config"] |= {
            "projector_type": "domino",
            "emb_dim": INNER,
            "gru_hidden_dim": RANK,
            "pure_draft_prefix_len": 1,
            "shift_label": kind in FROM_ANCHOR,
        }
    return config | more


def write(folder, config, weights):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


class Dense:
    """The drafter in float64, without a cache."""

    def __init__(self, target, weights, kind, *, theta=1000.0, window=None, causal=True):
        """The first layer may have a sliding window."""
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
        self.w = {name: tensor.double() for name, tensor in weights.items()}
        self.kind, self.theta, self.window, self.causal = kind, theta, window, causal

    def rms(self, x, name):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.w[name]

    def turn(self, x, at):
        half = WIDTH // 2
        angle = at[:, None].double() * self.theta ** (-torch.arange(half).double() / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def convolve(self, x, dynamic, base):
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for tap in range(2):
                if row >= tap:
                    for group in range(x.shape[1] // 16):
                        cut = slice(16 * group, 16 * group + 16)
                        out[row, cut] += (base[tap, cut] + dynamic[row, tap, group]) * x[row - tap, cut]
        return out

    def part(self, name, x, run):
        if self.kind != "dflash2":
            return run(x)
        base = self.w[f"{name}.base_kernel"]
        dynamic = (x @ self.w[f"{name}.kernel_projection.weight"].T).view(len(x), 2, 2, -1)
        return self.convolve(run(self.convolve(x, dynamic[:, 0], base[0])), dynamic[:, 1], base[1])

    @torch.no_grad()
    def states(self, committed):
        """Of all rows of the block behind ``committed``."""
        w, n = self.w, len(committed) - 1
        hidden = self.model(torch.tensor([committed[:-1]]), output_hidden_states=True).hidden_states
        context = self.rms(torch.cat([hidden[1][0], hidden[2][0]], -1) @ w["fc.weight"].T, "hidden_norm.weight")
        x = self.model.get_input_embeddings()(torch.tensor([committed[-1]] + [MASK] * (BLOCK - 1)))
        at = torch.arange(n, n + BLOCK)
        for i in range(LAYERS):
            name = f"layers.{i}.self_attn."

            def attend(rows, name=name, i=i):
                read = torch.cat([context, rows])
                q = self.rms((rows @ w[f"{name}q_proj.weight"].T).view(-1, HEADS, WIDTH), f"{name}q_norm.weight")
                k = self.rms((read @ w[f"{name}k_proj.weight"].T).view(-1, KV_HEADS, WIDTH), f"{name}k_norm.weight")
                v = (read @ w[f"{name}v_proj.weight"].T).view(-1, KV_HEADS, WIDTH)
                q, k = self.turn(q, at), self.turn(k, torch.arange(n + BLOCK))
                k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
                scores = torch.einsum("qhw,khw->hqk", q, k) / WIDTH**0.5
                if i == 0 and self.window is not None:
                    distance = at[:, None] - torch.arange(n + BLOCK)
                    scores[:, (distance >= self.window) | (self.causal & (distance < 0))] = -torch.inf
                weights = scores.softmax(-1)
                return torch.einsum("hqk,khw->qhw", weights, v).flatten(1) @ w[f"{name}o_proj.weight"].T

            def feed(rows, i=i):
                gate, up, down = (w[f"layers.{i}.mlp.{p}_proj.weight"] for p in ("gate", "up", "down"))
                return (torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T

            x = x + self.part(f"layers.{i}.attention_conv", self.rms(x, f"layers.{i}.input_layernorm.weight"), attend)
            normed = self.rms(x, f"layers.{i}.post_attention_layernorm.weight")
            x = x + self.part(f"layers.{i}.mlp_conv", normed, feed)
        return self.rms(x, "norm.weight")

    @torch.no_grad()
    def logits(self, state, *tokens):
        """Of the token behind ``tokens`` of the block."""
        w, said, before = self.w, self.model.lm_head(state), tokens[-1]
        if self.kind == "dspark":
            said = said + w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][before]
        if self.kind.startswith("domino") and len(tokens) > 1:  # the first token is the block's own
            gru = torch.nn.GRU(len(state), RANK, bias=False, dtype=torch.float64)
            gru.load_state_dict({name: w[f"prefix_gru.{name}"] for name in ("weight_ih_l0", "weight_hh_l0")})
            read = gru(self.model.get_input_embeddings()(torch.tensor(tokens)))[0][-1]
            inner = torch.nn.functional.silu(w["embed_proj.0.weight"] @ torch.cat([state, read]))
            said = said + w["embed_proj.2.weight"] @ inner
        if self.kind == "dflash2":
            values, ids = said.topk(6)
            at = "candidate_selector."
            read = w[f"{at}predecessor_codebook"][before] * (w[f"{at}hidden_projection.weight"] @ state)
            said = torch.full_like(said, -torch.inf)
            said[ids] = values + w[f"{at}successor_codebook"][ids] @ read
        return said

    def sure(self, state, before):
        read = torch.cat([state, self.w["markov_head.markov_w1.weight"][before]])
        return float(
            torch.sigmoid(self.w["confidence_head.proj.weight"][0] @ read + self.w["confidence_head.proj.bias"][0])
        )

    def draft(self, committed, count):
        states, tokens = self.states(committed), [committed[-1]]
        for depth in range(count):
            row = depth + (self.kind not in FROM_ANCHOR)
            tokens.append(int(self.logits(states[row], *tokens).argmax()))
        return tokens[1:]


def case(target, kind, **more):
    """Config, weights, and the drafter in float64."""
    config = config_of(target, kind)
    weights = random_weights(config["hidden_size"], config["vocab_size"], 2, kind)
    return config, weights, Dense(target, weights, kind, **more)


@pytest.fixture(scope="module", params=["dflash", "dflash2", "dspark", "domino", "domino-shifted"])
def made(request, tiny_target, tmp_path_factory):
    config, weights, dense = case(tiny_target, request.param)
    return request.param, write(tmp_path_factory.mktemp(request.param), config, weights), dense


def draft(target, folder, **options):
    """The files say which method."""
    return first_draft(target, {"model": str(folder), "num_speculative_tokens": 4, **options}, PROMPT)


@pytest.mark.parametrize("count", [2, 4])
def test_it_drafts_what_the_dense_form_says(tiny_target, made, count):
    _, folder, dense = made
    drafted, committed = draft(tiny_target, folder, num_speculative_tokens=count)
    assert drafted == dense.draft(committed, count)


def test_q_is_the_dense_forms_at_every_node_of_later_rounds(tiny_target, made, listen):
    _, folder, dense = made
    config = {"method": "dflash", "model": str(folder), "num_speculative_tokens": 3, "accept": "token"}
    llm = LLM(tiny_target, speculative_config=config)
    (drafter,) = llm.engine.router.drafters.values()
    seen = []

    def recorded(logits, rows, *more):
        seen.extend((list(row.sequence.tokens), list(row.path), each.clone()) for row, each in zip(rows, logits))

    listen(drafter.chooser, "choose", recorded)
    llm.generate([PROMPT], SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True))
    assert len({len(tokens) for tokens, _, _ in seen}) > 2
    for tokens, path, logits in seen:
        state = dense.states(tokens)[len(path) + (dense.kind not in FROM_ANCHOR)]
        expected = dense.logits(state, tokens[-1], *path).softmax(-1)
        torch.testing.assert_close(logits.double().softmax(-1), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("causal", "falls_back"), [(None, False), (False, True)])
def test_layers_with_a_sliding_window(tiny_target, tmp_path, caplog, causal, falls_back):
    """Such layers are causal unless the file says otherwise, which our kernel does not serve."""
    config, weights, dense = case(tiny_target, "dflash", window=4, causal=causal is None)
    config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    config |= {} if causal is None else {"is_causal": causal}
    drafted, committed = draft(tiny_target, write(tmp_path / "d", config, weights))
    assert drafted == dense.draft(committed, 4)
    assert ("our kernel has no sliding window" in caplog.text) == falls_back


def test_sequences_of_several_lengths_draft_side_by_side(tiny_target, tmp_path):
    """Each sees its own context and block alone, in every round."""
    config, weights, dense = case(tiny_target, "dflash")
    spec = {"model": str(write(tmp_path / "d", config, weights)), "num_speculative_tokens": 3, "prefill_chunk": 4}
    llm = LLM(tiny_target, speculative_config=spec, trace=True)
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (9, 12, 5)]
    for answer in llm.generate([PROMPT, PROMPT[4:], PROMPT[:2]], params):
        drafts = list(drafts_of(answer))
        assert drafts
        for committed, drafted in drafts:
            assert drafted == dense.draft(committed, len(drafted))


def test_a_confidence_head_ends_chains(tiny_target, tmp_path):
    config, weights, dense = case(tiny_target, "dspark")
    write(tmp_path / "d", config, weights)
    lengths = set()
    for threshold in (0.02, 0.3, 0.9):
        drafted, committed = draft(tiny_target, tmp_path / "d", confidence_threshold=threshold)
        states, chance, before, expected = dense.states(committed), 1.0, committed[-1], []
        for depth, token in enumerate(dense.draft(committed, 4)):
            expected.append(token)
            chance *= dense.sure(states[depth], before)
            before = token
            if chance < threshold:
                break
        assert drafted == expected
        lengths.add(len(drafted))
    assert len(lengths) > 1


def test_speculators_count_layers_from_the_embeddings_and_may_draft_from_part_of_the_vocabulary(tiny_target, tmp_path):
    """The same weights in speculators' form, whose own output layer has some of the target's rows."""
    flat, weights, dense = case(tiny_target, "dspark")
    ids = torch.arange(0, flat["vocab_size"], 2)
    names = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
             "num_hidden_layers", "rms_norm_eps", "rope_theta")  # fmt: skip
    config = {
        "speculators_model_type": "dspark", "aux_hidden_state_layer_ids": [1, 2], "block_size": BLOCK,
        "mask_token_id": MASK, "markov_rank": RANK, "sample_from_anchor": True,
        "transformer_layer_config": {name: flat[name] for name in names},
    }  # fmt: skip
    weights["lm_head.weight"] = dense.model.lm_head.weight.detach().float()[ids]
    weights["markov_head.markov_w2.weight"] = weights["markov_head.markov_w2.weight"][ids]
    weights["d2t"] = ids - torch.arange(len(ids))
    write(tmp_path / "s", config, weights)
    drafted, committed = draft(tiny_target, tmp_path / "s")
    states, before, expected = dense.states(committed), committed[-1], []
    for depth in range(4):
        before = int(ids[dense.logits(states[depth], before)[ids].argmax()])
        expected.append(before)
    assert drafted == expected


def test_other_files_are_refused_in_one_line(tiny_target, tmp_path):
    config, weights, _ = case(tiny_target, "dflash2")
    own = config["dflash_config"]
    short = {**weights, "candidate_selector.successor_codebook": torch.zeros(7, RANK)}
    codes = {f"candidate_selector.{name}_codebook": torch.zeros(12, RANK) for name in ("predecessor", "successor")}
    domino = {"prefix_gru.weight_hh_l0": torch.zeros(3 * RANK, RANK), "embed_proj.0.weight": torch.zeros(INNER, 40)}
    cases = [
        ({**config, "speculators_model_type": "peagle"}, weights, "it is 'peagle'; dflash, dflash2, dspark files"),
        (config, {k: t for k, t in weights.items() if k != "fc.weight"}, "it has no fc and hidden_norm"),
        ({**config, "dflash_config": {**own, "target_layer_ids": [0, 7]}}, weights, "the target has 2: it was made"),
        ({**config, "dflash_config": {**own, "target_layer_ids": [0]}}, weights, "its fc takes 64 numbers, 1 hidden"),
        ({**config, "dflash_config": {**own, "mask_token_id": 5000}}, weights, "mask_token_id 5000 is outside"),
        ({**config, "dflash_config": {"mask_token_id": 1}}, weights, "does not say which of the target's layers"),
        (config, short, "its successor_codebook is of 7 tokens, its vocabulary of"),
        ({**config, "block_size": 1}, weights, "block_size is an integer of at least 2"),
        ({**config, "output_multiplier": 2.0}, weights, "output_multiplier 2.0 is not served"),
        ({**config, "markov_head_type": "rnn"}, weights, "markov_head_type 'rnn' is not served"),
        ({**config, "pure_draft_prefix_len": -1}, {**weights, **domino}, "has -1 as pure_draft_prefix_len"),
        ({**config, "rope_scaling": {"rope_type": "yarn"}}, weights, "supports the default RoPE only"),
        ({**config, "num_hidden_layers": 3}, weights, "the weights do not fit their config: blocks.2"),
        ({**config, "vocab_size": 12}, {**weights, **codes}, "was trained for a target"),
    ]  # fmt: skip
    for index, (said, tensors, message) in enumerate(cases):
        folder = write(tmp_path / str(index), said, tensors)
        config = {"method": "dflash", "model": str(folder)}
        refused(ForerunError, message, LLM, tiny_target, speculative_config=config)
