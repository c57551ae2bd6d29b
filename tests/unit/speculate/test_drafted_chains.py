"""Chains drafted in one call are what a step at a time drafts: tokens, trials and q, bit by bit. Draft models that
predict only some of their tokens, and ids that only one of the two models has."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from described import CASES
from drafting import fill
from forerun import LLM, SamplingParams, kernels, pretrained
from forerun.core.tree import Draft
from forerun.models.load import load_model
from forerun.speculate.draft import drafters
from forerun.speculate.draft.chain import ChainRunner
from forerun.speculate.draft.heads.head import Sizes
from forerun.speculate.draft.model import DraftModel
from forerun_lab.heads.eagle import TrainedEagle
from forerun_lab.vllm import first_branch
from here import where
from tiny import ALPHABET, save_checkpoint, tiny_llama
from tiny_seq2seq import save_seq2seq

PROMPTS = ["def foo(x): return x", "abcabcabcabc", "hello world, hello wor", "x"]
OPTIONS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 9, "min_p": 0.01},
]


SURE = {"confidence_threshold": 0.01}


@pytest.fixture(params=["draft_model", "sure", "eagle", "reduced", "blocks", "mtp", "gemma2", "qwen3_moe-some"])
def options(request, described, tiny_target, tiny_draft, tmp_path):
    if request.param in ("draft_model", "sure"):
        return {"method": "draft_model", "model": tiny_draft} | (SURE if request.param == "sure" else {})
    if request.param in CASES:
        return {"method": "draft_model", "model": described(request.param)}
    if request.param in ("reduced", "blocks"):
        kind = "int8_rows" if request.param == "reduced" else "q4_0"
        model = reduced_head(Path(tiny_target), tmp_path)
        return {"method": "eagle", "model": model, "quantization": kind, "confidence_threshold": 0.05}
    method = request.param
    more = SURE | {"draft_vocab_size": 60} if method == "mtp" else {}
    return {"method": method, **drafters[method].example(Path(tiny_target), tmp_path), **more}


def reduced_head(target, folder):
    """An EAGLE head that knows every third token, with a matrix before its layer."""
    config = json.loads((target / "config.json").read_text("utf-8"))
    ids = torch.arange(1, config["vocab_size"], 3)
    options = {"mixed": True, "draft_vocab_size": len(ids), "heads": 4, "kv_heads": 2, "width": 8, "inner_size": 24}
    torch.manual_seed(1)
    head = TrainedEagle(Sizes(config["hidden_size"], config["vocab_size"], config["num_hidden_layers"], 4, options))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    head.d2t.copy_(ids - torch.arange(len(ids)))
    head.save(folder)
    return str(folder)


@pytest.fixture
def siblings(monkeypatch):
    """Chains alone are verified; what stood beside their last tokens, as (text, chain, token)."""
    draft, result = ChainRunner.draft, []

    def chains(self, everyone, *given, **more):
        drafts = draft(self, everyone, *given, **more)
        for index, each in enumerate(drafts):
            if not each.is_chain:
                chain = first_branch(each)
                result.append((list(everyone[index].tokens), chain, each.tokens[-1]))
                rows = [trials[0].q_row for trials in each.trials[: len(chain)]]
                drafts[index] = Draft.chain(chain, each.q, rows)
        return drafts

    monkeypatch.setattr(ChainRunner, "draft", chains)
    return result


def record(target, options, *, page_size=None, stepwise=False):
    """Every draft of every round: tokens, parents, and each trial with its row of q."""
    llm = LLM(
        target, dtype="bfloat16", max_num_seqs=4, page_size=page_size,
        speculative_config={**options, "num_speculative_tokens": 4},
    )  # fmt: skip
    drafter = next(iter(llm.engine.router.drafters.values()))
    assert isinstance(drafter.chains, ChainRunner)
    if stepwise:
        drafter.chains = None
    rounds = []

    def see(result):
        rounds.append([
            (draft.tokens, draft.parents, [
                [(trial.node, draft.q[trial.q_row].clone() if trial.q_row >= 0 else None) for trial in trials]
                for trials in draft.trials
            ])
            for draft in result.drafts
        ])  # fmt: skip

    llm.engine.on_round = see
    params = [SamplingParams(**each, seed=i, max_tokens=20 + i, ignore_eos=True) for i, each in enumerate(OPTIONS)]
    llm.generate(PROMPTS, params)
    llm.engine.check()
    return rounds


def same(one, other):
    def flat(value):
        if isinstance(value, torch.Tensor):
            return value.view(torch.int32).tolist()
        return [flat(part) for part in value] if isinstance(value, list | tuple) else value

    return flat(one) == flat(other)


@pytest.mark.parametrize(("rule", "page_size"), where(kernels.has("draft_bfloat16"), [("coupled", 4), ("token", None)]))
def test_one_call_drafts_what_single_steps_draft(tiny_target, options, rule, page_size, siblings):
    options = {**options, "accept": rule}
    chains = record(tiny_target, options, page_size=page_size)
    steps = record(tiny_target, options, page_size=page_size, stepwise=True)
    assert any(tokens for drafts in chains for tokens, _, _ in drafts)
    assert any(siblings) == (rule == "coupled" and "confidence_threshold" in options)
    assert same(chains, steps)


@pytest.mark.parametrize("stepwise", [*where(kernels.has("draft_float32"), [False]), True])
@torch.no_grad()
def test_a_chain_ends_where_it_is_unlikely_to_be_kept(tiny_target, tiny_draft, stepwise, siblings):
    """By transformers' probabilities of the draft's likeliest tokens. Beside the last one is the second likeliest."""
    reference = AutoModelForCausalLM.from_pretrained(tiny_draft, dtype=torch.float32).eval()
    config = {"method": "draft_model", "model": tiny_draft, "num_speculative_tokens": 5, **SURE}
    llm = LLM(tiny_target, dtype="float32", speculative_config=config, trace=True)
    drafter = next(iter(llm.engine.router.drafters.values()))
    assert isinstance(drafter, DraftModel)
    if stepwise:
        drafter.chains = None
    assert (drafter.chains is None) == stepwise
    lengths = set()
    for out in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)):
        trace = out.outputs[0].trace
        text = [*out.prompt_token_ids, *trace[0].tokens]  # that round only reads the prompt
        for entry in trace[1:-5]:  # the last ones are short of room
            kept = [token for token, origin in zip(entry.tokens, entry.origins) if origin == "accepted"]
            ahead, chances = list(text), [1.0]
            for token in [*kept, *entry.rejected]:
                distribution = reference(torch.tensor([ahead])).logits[0, -1].softmax(-1)
                chances.append(chances[-1] * float(distribution.max()))
                assert token == int(distribution.argmax())
                ahead.append(token)
            assert min(chances[:-1]) >= SURE["confidence_threshold"]
            assert chances[-1] < SURE["confidence_threshold"] or entry.drafted == 5
            lengths.add(entry.drafted)
            text += entry.tokens
    assert len(lengths) > 2
    assert any(siblings) != stepwise
    for text, chain, sibling in siblings:
        ranked = reference(torch.tensor([[*text, *chain[:-1]]])).logits[0, -1].topk(2).indices.tolist()
        assert ranked == [chain[-1], sibling]


@pytest.mark.parametrize("size", where(kernels.has("draft_float32"), [None, 60]))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_next_best_token_beside_the_last_is_accepted(tiny_target, tiny_draft, temperature, size, llm):
    config = {"method": "draft_model", "model": tiny_draft, "num_speculative_tokens": 5, "confidence_threshold": 0.05,
              "draft_vocab_size": size}  # fmt: skip
    branched = LLM(tiny_target, speculative_config=config)
    beside = []

    def see(result):
        for draft, verdict in zip(result.drafts, result.verdicts):
            if not draft.is_chain:
                beside.append(len(draft) - 1 in verdict.path[: verdict.accepted])

    branched.engine.on_round = see
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True) for i in range(4)]
    answers = [[answer.outputs[0].token_ids for answer in each.generate(PROMPTS, params)] for each in (branched, llm())]
    assert answers[0] == answers[1]
    assert any(beside)
    assert not all(beside)
    branched.engine.check()


@pytest.mark.parametrize("order", where(kernels.has("draft_float32"), ["reversed", "shuffled"]))
def test_outputs_in_any_order_have_another_token_beside_the_last(tiny_target, tmp_path, order):
    path = Path(reduced_head(Path(tiny_target), tmp_path)) / "model.safetensors"
    with safe_open(path, "pt") as file:
        tensors, notes = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    rows = torch.arange(len(tensors["d2t"]))
    ids = rows + tensors["d2t"]
    torch.manual_seed(0)
    tensors["d2t"] = (ids.flip(0) if order == "reversed" else ids[torch.randperm(len(ids))]) - rows
    save_file(tensors, path, notes)
    config = {"method": "eagle", "model": str(tmp_path), "num_speculative_tokens": 4, "confidence_threshold": 0.1}
    llm, drafts = LLM(tiny_target, speculative_config=config), []
    llm.engine.on_round = lambda result: drafts.extend(result.drafts)
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    branched = [draft for draft in drafts if not draft.is_chain]
    assert len(branched) > 20
    for draft in branched:
        assert draft.tokens[-1] != draft.tokens[-2]
        assert set(draft.tokens) <= set(ids.tolist())
    assert all(len({trial.node for trial in trials}) == len(trials) for draft in drafts for trials in draft.trials)


SIZE = 700
OUTPUTS_PROMPTS = ["def parse(", "class Reader:", "for line in"]


def speculating(**more):
    return LLM(speculative_config={"method": "draft_model", "num_speculative_tokens": 4, **more})


@pytest.mark.parametrize("more", [{}, {"tree": [2, 2], "num_speculative_tokens": 2}, {"accept": "token"}])
def test_only_those_tokens_are_drafted(more):
    """Chains and trees, for greedy and sampled requests, by a coupled rule and one that compares p with q."""
    llm = speculating(draft_vocab_size=SIZE, **more)
    (drafter,) = llm.engine.router.drafters.values()
    permitted = set(drafter.output_ids.tolist())
    assert len(permitted) == SIZE
    assert set(llm.engine.model.info.eos_ids) <= permitted
    seen = set()
    llm.engine.on_round = lambda result: seen.update(t for draft in result.drafts for t in draft.tokens)
    for temperature in (0.0, 0.9):
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=40)
        out = llm.generate(OUTPUTS_PROMPTS, params, use_tqdm=False)
        plain = llm.generate(OUTPUTS_PROMPTS, params, use_tqdm=False, speculate=False)
        if "accept" not in more or temperature == 0.0:
            assert [o.outputs[0].token_ids for o in out] == [o.outputs[0].token_ids for o in plain]
        assert any(o.metrics.num_accepted_draft_tokens for o in out)
    assert seen <= permitted
    assert len(seen) > 20


def test_a_table_of_the_tokenizers_says_which(tmp_path, monkeypatch):
    def table(name, shift):
        known = {str(token): tokenizer.convert_ids_to_tokens(token + shift) for token in (5, 90, 1000)}
        save_file({"tokens": torch.tensor([2000, 7, 300, 60], dtype=torch.int32)}, tmp_path / name, metadata=known)

    tokenizer = speculating().get_tokenizer()
    monkeypatch.setattr(pretrained, "common_tokens", lambda: sorted(tmp_path.iterdir()))
    table("another's", 1)
    assert speculating().engine.router.drafters["draft_model"].output_ids is None
    table("its", 0)
    llm = speculating()
    ends = set(llm.engine.model.info.eos_ids)
    drafter = llm.engine.router.drafters["draft_model"]
    assert len(drafter.output_ids) == 4
    assert ends < set(drafter.output_ids.tolist()) <= ends | {2000, 7, 300}
    vocabulary = llm.engine.model.info.vocab_size
    assert speculating(draft_vocab_size=vocabulary).engine.router.drafters["draft_model"].output_ids is None


def test_the_tables_that_come_along():
    for path in pretrained.common_tokens():
        with safe_open(path, "pt") as file:
            tokens = file.get_tensor("tokens").tolist()
            assert len(tokens) == len(set(tokens)) == 49_152
            assert len(file.metadata()) == 9


@pytest.mark.parametrize("quantization", [None, "q8_0"])
def test_its_logits_are_the_whole_layers_rows(quantization):
    from forerun.core.batch import Batch, Span
    from forerun.models.run.base import new_attention

    names = torch.tensor([0, 3, 17, 300, 301, 999])
    result = []
    for outputs in (None, names):
        model = load_model(pretrained.path("draft"), dtype="float32", outputs=outputs, quantization=quantization)
        attention = new_attention(model, max_seqs=1, max_len=32)
        attention.pool.reserve(0, 4)
        batch = Batch([Span(0, 0, [5, 6, 7, 8], logits=[1, 3])], model.info.device)
        result.append(model.forward(batch, attention).logits)
    assert torch.equal(result[0][:, names], result[1])


ROWS = len(ALPHABET) + 8
ROWS_PROMPTS = [[40, 41, 42, 9, 8, 40, 41], [5, 9, ROWS - 1, 7, len(ALPHABET), 9], [8, 9, 8, 9, 8, 9, 8]]
STRANGE = 1
"""The prompt with ids that the draft lacks."""
DRAFT = {"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 3}
CONFIGS = {
    "chain": DRAFT,
    "tree": {**DRAFT, "tree": [3, 2, 1]},
    "staged": {"method": "staged", "model": "DRAFT"},
    "staged-model": {"method": "staged", "model": "DRAFT", "drafter": DRAFT},
    "staged-recycling": {"method": "staged", "model": "DRAFT", "drafter": {"method": "token_recycling"}},
    "cascade": {"method": "cascade", "drafters": [{"method": "ngram"}, DRAFT]},
    "tli": {**DRAFT, "use_heterogeneous_vocab": True},
    "slem": {**DRAFT, "use_heterogeneous_vocab": True, "heterogeneous_vocab_method": "slem"},
}


def params(temperature):
    return SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def wide(tmp_path_factory, tiny_target):
    """The target with more rows than its tokenizer has tokens, likely ones."""
    model, known = tiny_llama(vocab_size=ROWS), LlamaForCausalLM.from_pretrained(tiny_target).state_dict()
    own = model.state_dict()
    for name, value in known.items():
        own[name][: len(value)] = value
    model.load_state_dict(own)
    return save_checkpoint(model, tmp_path_factory.mktemp("wide"))


def check(plain, speculative, prompts, temperature):
    options = params(temperature)
    expected = plain.generate(prompts, options)
    answers = speculative.generate(prompts, options)
    assert [answer.outputs[0].token_ids for answer in answers] == [answer.outputs[0].token_ids for answer in expected]
    for index, answer in enumerate(answers):
        assert answer.metrics.draft_error is None
        assert answer.metrics.num_draft_tokens > 0, index
    others = [index for index in range(len(prompts)) if index != STRANGE]
    for index, alone in zip(others, speculative.generate([prompts[index] for index in others], options)):
        assert answers[index].metrics.accepted_per_step == alone.metrics.accepted_per_step
    speculative.engine.check()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", CONFIGS)
def test_they_cost_nobody_the_drafts(name, temperature, wide, tiny_draft, llm):
    speculative = llm(fill(CONFIGS[name], {"DRAFT": tiny_draft}), wide)
    seen = {
        token for answer in llm(None, wide).generate(ROWS_PROMPTS, params(2.0)) for token in answer.outputs[0].token_ids
    }
    assert max(seen) >= len(ALPHABET)  # answers have such ids too
    check(llm(None, wide), speculative, ROWS_PROMPTS, temperature)


@pytest.mark.parametrize("drafting", ["t5", "decoder"])
def test_they_may_be_in_a_source(drafting, tmp_path, seq2seq, tiny_draft):
    save_seq2seq("t5", tmp_path, vocab_size=ROWS)
    draft = seq2seq("t5") if drafting == "t5" else tiny_draft
    speculative = LLM(str(tmp_path), speculative_config=fill(DRAFT, {"DRAFT": draft}))
    check(LLM(str(tmp_path)), speculative, ROWS_PROMPTS, 0.9)


def test_the_last_row_is_read_for_them(tiny_draft, wide, llm):
    """What the draft says of them is what transformers says of its last token."""
    drafter = next(iter(llm(fill(DRAFT, {"DRAFT": tiny_draft}), wide).engine.router.drafters.values()))
    heard = []
    forward = drafter.model.forward

    def listening(batch, attention):
        output = forward(batch, attention)
        heard.append(output.logits[0])
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter.model, "forward", listening)
        patch.setattr(drafter, "chains", None)
        llm(fill(DRAFT, {"DRAFT": tiny_draft}), wide).generate([ROWS_PROMPTS[STRANGE]], params(0.0))
    last = len(ALPHABET) - 1
    reference = LlamaForCausalLM.from_pretrained(tiny_draft).eval()
    with torch.inference_mode():
        first = next(logits for logits in heard)
        text = [min(token, last) for token in ROWS_PROMPTS[STRANGE]]
        answer = llm(None, wide).generate([ROWS_PROMPTS[STRANGE]], params(0.0))[0].outputs[0].token_ids
        expected = reference(torch.tensor([[*text, min(answer[0], last)]])).logits[0, -1]
    torch.testing.assert_close(first, expected, atol=1e-4, rtol=1e-4)
