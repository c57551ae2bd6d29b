"""The laboratory's heads: what they compute, beside the whole sequence at once; what an EAGLE head learns."""

from pathlib import Path

import pytest
import torch

from drafting import first_draft
from forerun import LLM, ConfigError
from forerun.speculate.draft.heads.head import Sizes
from forerun_lab.drafters.layerskip import ExitHead
from forerun_lab.drafters.medusa import MedusaHead
from forerun_lab.drafters.parallel import ContextCache, ParallelHead
from forerun_lab.heads.eagle import TrainedEagle
from forerun_lab.heads.training import TrainingBatch, feed_forward
from unrolled import SOME, narrowed, scramble, sizes_of, unrolled

pytestmark = pytest.mark.slow

PROMPT = [5, 9, 12, 7, 7, 3, 5, 9, 12, 11, 4]


@pytest.mark.parametrize("ids", [None, SOME], ids=["all", "some"])
@torch.no_grad()
def test_medusa_drafts_the_argmax_of_its_heads(tiny_target, tmp_path, reference, ids):
    head = MedusaHead(sizes_of(Path(tiny_target)))
    rows = narrowed(head, reference, ids)
    head.save(tmp_path)
    config = {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": 4}
    drafted, committed = first_draft(tiny_target, config, PROMPT)
    saved = MedusaHead.load(tmp_path)
    out = reference(torch.tensor([committed[:-1]]), output_hidden_states=True)
    state = out.hidden_states[-1][0, -1]
    best = [int((rows @ (state + torch.nn.functional.silu(block(state)))).argmax()) for block in saved.blocks]
    assert drafted == (best if ids is None else ids[best].tolist())


@pytest.mark.parametrize("ids", [None, SOME], ids=["all", "some"])
@pytest.mark.parametrize("drafted_tokens", [2, 4])
@torch.no_grad()
def test_parallel_drafts_what_a_whole_block_says_however_few_tokens_are_asked_for(
    tiny_target, tmp_path, reference, drafted_tokens, ids
):
    options = {"heads": 4, "kv_heads": 2, "width": 8, "inner_size": 24, "blocks": 2}
    head = ParallelHead(Sizes(**{**vars(sizes_of(Path(tiny_target))), "options": options}))
    rows = narrowed(head, reference, ids)
    head.save(tmp_path)
    config = {"method": "parallel", "model": str(tmp_path), "num_speculative_tokens": drafted_tokens}
    drafted, committed = first_draft(tiny_target, config, PROMPT)
    saved = ParallelHead.load(tmp_path)
    out = reference(torch.tensor([committed[:-1]]), output_hidden_states=True)
    features = saved.feature(torch.cat([out.hidden_states[layer][0] for layer in saved.layers], dim=-1))
    count = features.shape[0]
    x = saved.rows(reference.get_input_embeddings()(torch.tensor(committed[-1:])), features[-1:])[0]
    for block in saved.blocks:
        normed = block.norm(x)
        places = count + torch.arange(4)
        k, v = (torch.cat(pair) for pair in zip(block.keys(features, torch.arange(count)), block.keys(normed, places)))
        scores = torch.einsum("qhw,khw->hqk", block.queries(normed, places), k.repeat_interleave(2, 1)) / 8**0.5
        mixed = torch.einsum("hqk,khw->qhw", scores.softmax(-1), v.repeat_interleave(2, 1)).flatten(1)
        x = x + block.o_proj(mixed)
        x = x + feed_forward(block.mlp, block.norm_mlp(x))
    best = (saved.norm(x) @ rows.T).argmax(-1)[:drafted_tokens]
    assert drafted == (best if ids is None else ids[best]).tolist()


@pytest.mark.parametrize("window", [None, 5])
def test_a_block_reads_the_newest_window_or_everything(window):
    torch.manual_seed(0)
    layers, whole = 2, [torch.empty(0, 2, 3)] * 4
    memory = None
    for count in [1, 3, 2, 9, 1, 1, 4, 5, 1, 1, 1, 2, 3, 1, 7, 1]:
        rows = [torch.randn(count, 2, 3) for _ in range(2 * layers)]
        pairs = list(zip(rows[::2], rows[1::2]))
        memory = memory or ContextCache(pairs, 2, window)
        memory.add(pairs)
        whole = [torch.cat([before, new]) for before, new in zip(whole, rows)]
        own = torch.randn(2, 2, 2, 3)
        for layer in range(layers):
            memory.write(layer, own[0], own[1])
            for got, before, new in zip(memory.read(layer, 2), whole[2 * layer :], own):
                assert torch.equal(got[0].transpose(0, 1), torch.cat([before[-(window or len(before)) :], new]))


@torch.no_grad()
@pytest.mark.parametrize("path", ["native", "hf"])
def test_layerskip_drafts_what_the_first_layers_say(tiny_target, reference, path):
    layers = (0,)
    config = {"method": "layerskip", "layers": layers, "num_speculative_tokens": 3}
    drafted, tokens = first_draft(tiny_target, config, PROMPT, model_path=path)
    every = reference.model.layers
    reference.model.layers = torch.nn.ModuleList([every[i] for i in layers])
    expected = []
    for _ in range(3):
        expected.append(int(reference(torch.tensor([tokens + expected]), use_cache=False).logits[0, -1].argmax()))
    reference.model.layers = every
    assert drafted == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_head_computes_with_the_weights_it_has_now(dtype):
    torch.manual_seed(0)
    head = MedusaHead(Sizes(256, 300, 2, 1)).to(dtype)
    x = torch.randn(3, 256).to(dtype)
    results = []
    for _ in range(2):
        scramble(head)
        with torch.no_grad():
            head.blocks[0].weight.add_(len(results))
        head.pack()
        with torch.inference_mode():
            results.append(head.transform(x)[:, 0].float())
        block = head.blocks[0]
        expected = x.double() + torch.nn.functional.silu(x.double() @ block.weight.double().T + block.bias.double())
        assert (results[-1] - expected).abs().max() < (1e-5 if dtype == torch.float32 else 0.01) * expected.abs().max()
    assert not torch.allclose(*results)


@torch.no_grad()
def test_a_fresh_exit_head_on_the_last_layer_is_the_target_itself(tiny_target, reference):
    """It guesses what the state predicts, not the token behind that: its loss is the entropy of the target."""
    sizes = Sizes(**{**vars(sizes_of(Path(tiny_target))), "depth": 1})
    tokens = torch.randint(sizes.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    out = reference(tokens, output_hidden_states=True)
    states = dict(enumerate(out.hidden_states))
    embedding, head = reference.get_input_embeddings().weight, reference.lm_head.weight
    result = ExitHead(sizes).loss(TrainingBatch(tokens, states, out.logits, embedding, head, reference))
    entropy = torch.distributions.Categorical(logits=out.logits.double()).entropy().mean()
    assert abs(float(result) - float(entropy)) < 1e-4


def test_an_exit_head_belongs_to_its_layers(tiny_target, tmp_path):
    ExitHead(Sizes(**{**vars(sizes_of(Path(tiny_target))), "depth": 1})).save(tmp_path, {"exit_layer": 1})
    with pytest.raises(ConfigError, match="was trained after 1 layers"):
        LLM(str(tiny_target), speculative_config={"method": "layerskip", "layers": [1], "exit_head": str(tmp_path)})


@pytest.mark.parametrize(("method", "head"), [("medusa", MedusaHead), ("parallel", ParallelHead)])
def test_a_head_without_an_output_layer_has_none_to_quantize(tiny_target, tmp_path, method, head):
    head(sizes_of(Path(tiny_target))).save(tmp_path)
    config = {"method": method, "model": str(tmp_path), "quantization": "int8_rows"}
    with pytest.raises(ConfigError, match=f"this {method} head has no output layer of its own to quantize"):
        LLM(str(tiny_target), speculative_config=config)


@pytest.mark.parametrize("mixed", [False, True])
@torch.no_grad()
def test_what_eagle_learns_is_what_it_drafts(mixed):
    """Every step behind every place, of two texts end to end, as a draft of the text alone says it; while it is
    trained, later steps in half and a quarter of these places."""
    depth, length, texts = 3, 26, (11, 15)
    head = TrainedEagle(
        Sizes(24, 40, 4, depth, {"heads": 4, "kv_heads": 2, "width": 6, "layers": [2, 4], "mixed": mixed})
    )
    scramble(head)
    tokens, hidden = torch.randint(40, (2, length)), {layer: torch.randn(2, length, 24) for layer in (2, 4)}
    embedding, output = torch.randn(2, 40, 24)
    segments = torch.repeat_interleave(torch.arange(2), torch.tensor(texts)).expand(2, length)
    answers = torch.rand(2, length) < 0.7
    seen = TrainingBatch(tokens, hidden, None, embedding, output, torch.nn.Identity(), segments, answers)
    expected, targets = [[] for _ in range(depth)], [[] for _ in range(depth)]
    for row in range(2):
        for begin, count in zip((0, texts[0]), texts):
            here = slice(begin, begin + count)
            features = head.fc(torch.cat([hidden[layer][row, here] for layer in (2, 4)], dim=-1))
            embedded = embedding[tokens[row, here]]
            for index in range(count - depth - 1):
                if answers[row, begin + index + 2]:
                    said = head.norm(unrolled(head, features, embedded, index + 1, depth)) @ output.T
                    for step in range(depth):
                        expected[step].append(said[step])
                        targets[step].append(output @ hidden[4][row, begin + index + step + 1])
    every = list(head.eval().guesses(seen))
    for step, guess in enumerate(every):
        torch.testing.assert_close(guess.logits, torch.stack(expected[step]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(guess.target_logits, torch.stack(targets[step]), rtol=1e-4, atol=1e-4)
    counts = []
    for guess, whole in zip(head.train().guesses(seen), every):
        gap = (guess.target_logits[:, None] - whole.target_logits).abs().amax(-1)
        assert len(set(gap.argmin(1).tolist())) == len(gap)
        assert float((guess.logits - whole.logits[gap.argmin(1)]).abs().max()) < 1e-4
        counts.append(len(gap))
    assert counts == [len(expected[0]), -(-len(expected[0]) // 2), -(-len(expected[0]) // 4)]
