"""What an EAGLE head learns, and what it computes with when its weights are rounded."""

import pytest
import torch
from gguf import GGMLQuantizationType, quants

from forerun.models.formats import ON_CPU as formats
from forerun.speculate.draft.heads.head import Sizes
from forerun_lab.heads.eagle import TrainedEagle
from forerun_lab.heads.training import TrainingBatch
from here import where
from unrolled import scramble, unrolled


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


@pytest.mark.parametrize("kind", where(formats["q4_0"].can(torch.float32, torch.device("cpu")), ["q8_0", "q4_0"]))
@torch.no_grad()
def test_a_head_in_blocks_computes_with_its_rounded_weights(kind):
    """All of eagle, as the gguf package rounds it; what a layer reads is rounded to 8 bits, and nothing else."""
    head = TrainedEagle(
        Sizes(64, 40, 4, 2, {"heads": 2, "kv_heads": 1, "width": 32, "layers": [1, 4], "own_head": True})
    )
    scramble(head)
    x = torch.randn(5, 128)
    head.quantization = kind
    head.pack()
    for layer, given in ((head.fc, x), (head.lm_head, x[:, :64])):
        rounded = quants.quantize(layer.weight.numpy(), GGMLQuantizationType[kind.upper()])
        weight = torch.from_numpy(quants.dequantize(rounded, GGMLQuantizationType[kind.upper()]))
        expected = given.double() @ weight.double().T
        assert not torch.allclose(expected, given.double() @ layer.weight.double().T, rtol=1e-3)
        assert (layer(given) - expected).abs().max() < 0.01 * expected.abs().max()
    head.quantization = "int8_rows"
    head.pack()
    torch.testing.assert_close(head.fc(x), x @ head.fc.weight.T)
