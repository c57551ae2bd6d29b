"""``eagle``: EAGLE-3 (Li et al., arXiv 2503.01840), a one-layer decoder on the target's low, middle and high features.

``layers.py`` says how it drafts. The vocabulary may be reduced: row i of its output layer then stands for token
i + d2t[i].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from forerun.models.architectures.drafters import eagle, head_config
from forerun.models.architectures.shapes import Shape, shapes
from forerun.models.architectures.spec import Spec, bind
from forerun.models.weights.published import read_eagle
from forerun.speculate.draft.base import drafters
from forerun.speculate.draft.chain import FEEDS_NORMED, FEEDS_RAW
from forerun.speculate.draft.heads.head import OUTPUT, Head, Sizes
from forerun.speculate.draft.heads.layers import HeadLayerDrafter, LayerConfig

DEFAULTS = {"heads": 6, "kv_heads": 2, "width": 64, "inner_size": 768, "theta": 10000.0, "eps": 1e-5}
LAYER = "layers.0."
"""The prefix of the layer's weights in its description."""


class EagleHead(Head):
    """EAGLE-3's decoder layer, output layer and projection of hidden states.

    Options, besides sizes:

    - ``layers``: hidden states read.
    - ``draft_vocab_size`` (with ``d2t``) and ``own_head``: its output layer.
    - ``mixed``: one matrix projects the token's embedding and the feature to the layer's input, as in EAGLE (arXiv
      2401.15077), so that the embedding also reaches the output.
    - ``norm_before_residual``: the residual is the normed feature, as in some of speculators' heads.
    - ``norm_before_fc``: hidden states are normed together before they are projected.
    - ``fc_norm``: each hidden state is normed on its own before they are projected (EAGLE-3.1, arXiv 2605.09992).
    - ``norm_output``: the next step's feature is the normed output (EAGLE-3.1).
    - ``stretch``: the numbers ``LLAMA3`` of Llama 3's scaling of rotary frequencies.
    """

    method = "eagle"
    quantizes = True
    read_public = staticmethod(read_eagle)
    options_known = frozenset(DEFAULTS) | {
        "layers", "draft_vocab_size", "own_head", "mixed", "norm_before_residual", "norm_before_fc", "fc_norm",
        "norm_output", "stretch",
    }  # fmt: skip

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.options = o = {**DEFAULTS, **sizes.options}
        self.config = head_config(sizes, o)
        self.spec = bind(self.config, eagle(mixed=bool(o.get("mixed")), normed=bool(o.get("norm_before_residual"))))
        self.feeds = FEEDS_NORMED if o.get("norm_output") else FEEDS_RAW

    def shapes(self) -> dict[str, Shape]:
        size, count = self.sizes.hidden_size, len(self.layers)
        result = {name.removeprefix(LAYER): shape for name, shape in shapes(self.config, self.spec).items()}
        result |= {"fc.weight": (size, count * size), **self.output_shapes()}
        result |= {"input_norm.weight": (count * size,)} if self.options.get("norm_before_fc") else {}
        norms = range(count) if self.options.get("fc_norm") else ()
        return result | {f"fc_norm.{index}.weight": (size,) for index in norms}

    def pack(self) -> None:
        super().pack()
        self.fc: Any = self.linear_of("fc")
        self.input_norm: Any = self.norm_of("input_norm")
        norms = [self.norm_of(f"fc_norm.{index}") for index in range(len(self.layers))]
        self.fc_norm: Any = None if None in norms else norms

    def default_layers(self, last: int) -> tuple[int, ...]:
        """Low, middle and high; the paper's 2, n / 2 and n - 3 where the target is deep enough."""
        return (2, last // 2, last - 3) if last >= 12 else tuple(sorted({1, max(1, last // 2), max(1, last - 1)}))

    def feature(self, hidden: torch.Tensor) -> torch.Tensor:
        """Projects the target's hidden states [..., layers * hidden size] to features [..., hidden size]."""
        if self.fc_norm is not None:
            parts = hidden.chunk(len(self.fc_norm), dim=-1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        result: torch.Tensor = self.fc(hidden if self.input_norm is None else self.input_norm(hidden))
        return result

    def described(self) -> tuple[Any, Spec, dict[str, torch.Tensor]]:
        """Config, spec and weights of the layer, the final norm, and the output layer if it has its own."""
        names = {name: name.removeprefix(LAYER) for name in (*shapes(self.config, self.spec), OUTPUT)}
        return self.config, self.spec, {name: self.tensors[own] for name, own in names.items() if own in self.tensors}


@dataclass(frozen=True)
class EagleConfig(LayerConfig):
    """Options of a head and of trees."""


@drafters.register("eagle")
class Eagle(HeadLayerDrafter[EagleConfig]):
    name = "eagle"
    config_class = EagleConfig
    head_class: ClassVar[type[Head]] = EagleHead
