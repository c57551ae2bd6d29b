"""What an EAGLE head learns, and what it computes with when its weights are rounded."""

import pytest
import torch
from gguf import GGMLQuantizationType, quants

from forerun.models.formats import ON_CPU as formats
from forerun.speculate.draft.heads.head import Sizes
from forerun_lab.heads.eagle import TrainedEagle
from here import where
from unrolled import scramble


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
