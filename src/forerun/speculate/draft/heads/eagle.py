"""``eagle``: EAGLE-3 (Li et al., arXiv 2503.01840), a one-layer decoder on the target's low, middle and high features.

``layers.py`` says how it drafts. The vocabulary may be reduced: row i of its output layer then stands for token
i + d2t[i].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from forerun.models.architectures.drafters import eagle, head_config
from forerun.models.architectures.spec import Spec, bind
from forerun.models.weights.published import read_eagle
from forerun.speculate.draft.base import drafters
from forerun.speculate.draft.chain import FEEDS_NORMED, FEEDS_RAW
from forerun.speculate.draft.heads.head import FeedForward, Head, Norm, Sizes
from forerun.speculate.draft.heads.layers import HeadLayerDrafter, LayerConfig

DEFAULTS = {"heads": 6, "kv_heads": 2, "width": 64, "inner_size": 768, "theta": 10000.0, "eps": 1e-5}


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
        self.options = {**DEFAULTS, **sizes.options}
        size, o = sizes.hidden_size, self.options
        self.heads, self.kv_heads, self.width = o["heads"], o["kv_heads"], o["width"]
        self.config = head_config(sizes, o)
        self.feeds = FEEDS_NORMED if o.get("norm_output") else FEEDS_RAW
        self.fc = nn.Linear(len(self.layers) * size, size, bias=False)
        self.input_norm = Norm(self.fc.in_features, o["eps"]) if o.get("norm_before_fc") else None
        self.fc_norm = nn.ModuleList(Norm(size, o["eps"]) for _ in self.layers) if o.get("fc_norm") else None
        self.hidden_norm = Norm(size, o["eps"])
        self.post_attention_layernorm = Norm(size, o["eps"])
        self.norm = Norm(size, o["eps"])
        mixed = bool(o.get("mixed"))
        self.mix = nn.Linear(2 * size, size, bias=False) if mixed else None
        self.input_layernorm = None if mixed else Norm(size, o["eps"])
        read = size if self.mix is not None else 2 * size
        self.q_proj = nn.Linear(read, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(read, self.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(read, self.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, size, bias=False)
        nn.init.zeros_(self.o_proj.weight)
        self.mlp = FeedForward(size, o["inner_size"])
        self.make_lm_head(bool(o.get("own_head")))

    def default_layers(self, last: int) -> tuple[int, ...]:
        """Low, middle and high; the paper's 2, n / 2 and n - 3 where the target is deep enough."""
        return (2, last // 2, last - 3) if last >= 12 else tuple(sorted({1, max(1, last // 2), max(1, last - 1)}))

    def feature(self, hidden: torch.Tensor) -> torch.Tensor:
        """Projects the target's hidden states [..., layers * hidden size] to features [..., hidden size]."""
        if self.fc_norm is not None:
            parts = hidden.chunk(len(self.fc_norm), dim=-1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return self.fc(hidden if self.input_norm is None else self.input_norm(hidden))

    def described(self) -> tuple[Any, Spec, dict[str, torch.Tensor]]:
        """Config, spec and weights of the layer, the final norm, and the output layer if it has its own."""
        tensors, normed = {}, bool(self.options.get("norm_before_residual"))
        outer = ("norm.", "mix.", "lm_head.", *(["hidden_norm."] if normed else []))
        for name, tensor in self.named_parameters():
            if not name.startswith(("fc.", "input_norm.", "fc_norm.")):
                tensors[name if name.startswith(outer) else f"layers.0.{name}"] = tensor.detach()
        return self.config, bind(self.config, eagle(mixed=self.mix is not None, normed=normed)), tensors


@dataclass(frozen=True)
class EagleConfig(LayerConfig):
    """Options of a head and of trees."""


@drafters.register("eagle")
class Eagle(HeadLayerDrafter[EagleConfig]):
    name = "eagle"
    config_class = EagleConfig
    head_class: ClassVar[type[Head]] = EagleHead
