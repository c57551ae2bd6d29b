"""EAGLE-3 heads as published, and what they draft by a whole text at once, by torch's and transformers' own modules."""

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

from unrolled import seen_by

HEADS, KV_HEADS, WIDTH, INNER = 4, 2, 16, 24
THETA, EPS = 1000.0, 1e-6
EAGLE_IDS = torch.arange(0, 60, 3)
"""The tokens that a head drafts."""
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 2048}  # fmt: skip


def eagle_weights(size, *, fc_norm=False, input_norm=False, **_):
    """A head's tensors by the names that vLLM reads, for two hidden states of ``size``."""
    g = torch.Generator().manual_seed(0)

    def r(*shape):
        return torch.randn(*shape, generator=g) * 0.3

    at, wide, narrow = "layers.0.", HEADS * WIDTH, KV_HEADS * WIDTH
    weights = {
        "fc.weight": r(size, 2 * size),
        "norm.weight": 2 * torch.randn(size, generator=g),
        "lm_head.weight": r(len(EAGLE_IDS), size),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"{at}{name}.weight"] = 1 + r(size)
    shapes = {"q": (wide, 2 * size), "k": (narrow, 2 * size), "v": (narrow, 2 * size), "o": (size, wide)}
    weights |= {f"{at}self_attn.{name}_proj.weight": r(*shape) for name, shape in shapes.items()}
    shapes = {"gate": (INNER, size), "up": (INNER, size), "down": (size, INNER)}
    weights |= {f"{at}mlp.{name}_proj.weight": r(*shape) for name, shape in shapes.items()}
    if fc_norm:
        weights |= {f"fc_norm.{i}.weight": (1 + r(size)) * (i + 1) for i in range(2)}
    if input_norm:
        weights["input_norm.weight"] = 1 + r(2 * size)
    return weights


def config_of_head(size, **about):
    """A Llama layer's, with the head's sizes."""
    rope = {"rope_type": "default", **about.get("rope_scaling", {}), "rope_theta": THETA}
    return LlamaConfig(
        hidden_size=size, head_dim=WIDTH, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        intermediate_size=INNER, rope_parameters=rope,
    )  # fmt: skip


class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.q_proj = nn.Linear(2 * size, HEADS * WIDTH, bias=False)
        self.k_proj = nn.Linear(2 * size, KV_HEADS * WIDTH, bias=False)
        self.v_proj = nn.Linear(2 * size, KV_HEADS * WIDTH, bias=False)
        self.o_proj = nn.Linear(HEADS * WIDTH, size, bias=False)

    def forward(self, x, cos, sin, seen):
        q, k, v = (
            part(x).view(1, len(x), -1, WIDTH).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return self.o_proj(out[0].transpose(0, 1).flatten(1))


class Layer(nn.Module):
    def __init__(self, config, norm_before_residual):
        super().__init__()
        size = config.hidden_size
        self.input_layernorm, self.hidden_norm = nn.RMSNorm(size, eps=EPS), nn.RMSNorm(size, eps=EPS)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=EPS)
        self.self_attn, self.mlp = Attention(size), LlamaMLP(config)
        self.norm_before_residual = norm_before_residual

    def forward(self, embedded, feature, *about):
        normed = self.hidden_norm(feature)
        x = normed if self.norm_before_residual else feature
        x = x + self.self_attn(torch.cat([self.input_layernorm(embedded), normed], -1), *about)
        return x + self.mlp(self.post_attention_layernorm(x))


class Published(nn.Module):
    """The head behind the hidden states of the layers 1 and 2 of a target, a module of transformers."""

    def __init__(self, target, weights, *, norm_before_residual=False, norm_output=False, **about):
        super().__init__()
        config = config_of_head(target.config.hidden_size, **about)
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.input_norm = nn.RMSNorm(2 * size, eps=EPS) if about.get("input_norm") else nn.Identity()
        normed = about.get("fc_norm", False)
        self.fc_norm = nn.ModuleList(nn.RMSNorm(size, eps=EPS) if normed else nn.Identity() for _ in range(2))
        self.layers = nn.ModuleList([Layer(config, norm_before_residual)])
        self.norm, self.lm_head = nn.RMSNorm(size, eps=EPS), nn.Linear(size, len(EAGLE_IDS), bias=False)
        self.load_state_dict({name: weights[name] for name in self.state_dict()})
        self.rotary, self.norm_output, self.target = LlamaRotaryEmbedding(config), norm_output, [target]

    @torch.no_grad()
    def draft(self, committed, count, window=None, first=0):
        (target,) = self.target
        hidden = target(torch.tensor([committed[:-1]]), output_hidden_states=True).hidden_states
        states = torch.cat([norm(state[0]) for norm, state in zip(self.fc_norm, hidden[1:3])], -1)
        feature, tokens = self.fc(self.input_norm(states))[first:], committed[first:]
        for _ in range(count):
            length = len(feature)
            cos, sin = self.rotary(feature, torch.arange(length)[None])
            embedded = target.get_input_embeddings()(torch.tensor(tokens[1:]))
            said = self.layers[0](embedded, feature, cos, sin, seen_by(length, window))[-1]
            tokens.append(int(EAGLE_IDS[self.lm_head(self.norm(said)).argmax()]))
            feature = torch.cat([feature, (self.norm(said) if self.norm_output else said)[None]])
        return tokens[len(committed) - first :]
