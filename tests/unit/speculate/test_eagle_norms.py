"""EAGLE-3.1 as published: a norm for each hidden state before ``fc``, and normed outputs as the next features."""

from pathlib import Path

import pytest
import torch
from test_dflash import HEADS, INNER, KV_HEADS, WIDTH, config_of, draft, write
from test_heads_gguf import eagle_weights
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

from forerun.core.errors import ModelError
from refusals import refused

EPS = 1e-6
IDS = torch.arange(0, 60, 3)


class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.q_proj = nn.Linear(2 * size, HEADS * WIDTH, bias=False)
        self.k_proj = nn.Linear(2 * size, KV_HEADS * WIDTH, bias=False)
        self.v_proj = nn.Linear(2 * size, KV_HEADS * WIDTH, bias=False)
        self.o_proj = nn.Linear(HEADS * WIDTH, size, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = (
            part(x).view(1, len(x), -1, WIDTH).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out[0].transpose(0, 1).flatten(1))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        size = config.hidden_size
        self.input_layernorm, self.hidden_norm = nn.RMSNorm(size, eps=EPS), nn.RMSNorm(size, eps=EPS)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=EPS)
        self.self_attn, self.mlp = Attention(size), LlamaMLP(config)

    def forward(self, embedded, feature, cos, sin):
        read = torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], -1)
        x = feature + self.self_attn(read, cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Published(nn.Module):
    """The drafter over a whole text at once."""

    def __init__(self, config, fc_norm):
        super().__init__()
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.fc_norm = nn.ModuleList(nn.RMSNorm(size, eps=EPS) for _ in range(2)) if fc_norm else [nn.Identity()] * 2
        self.layers = nn.ModuleList([Layer(config)])
        self.norm, self.lm_head = nn.RMSNorm(size, eps=EPS), nn.Linear(size, len(IDS), bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    @torch.no_grad()
    def draft(self, tokens, states, embedding, count, norm_output):
        feature = self.fc(torch.cat([norm(state) for norm, state in zip(self.fc_norm, states, strict=True)], -1))
        tokens = list(tokens)
        for _ in range(count):
            cos, sin = self.rotary(feature, torch.arange(len(feature))[None])
            said = self.layers[0](embedding(torch.tensor(tokens[1:])), feature, cos, sin)[-1]
            tokens.append(int(IDS[self.lm_head(self.norm(said)).argmax()]))
            feature = torch.cat([feature, (self.norm(said) if norm_output else said)[None]])
        return tokens[-count:]


@pytest.mark.usefixtures("cpu_attention")
@pytest.mark.parametrize(("fc_norm", "norm_output"), [(True, False), (False, True), (True, True)])
def test_it_drafts_what_the_published_layers_say(tiny_target, tmp_path, fc_norm, norm_output):
    norms = {"fc_norm": fc_norm, "norm_output": norm_output}
    config = config_of(Path(tiny_target), "dflash", eagle_aux_hidden_state_layer_ids=[1, 2], **norms)
    size, vocabulary = config["hidden_size"], config["vocab_size"]
    weights = eagle_weights(size, vocabulary, IDS)
    torch.manual_seed(1)
    weights["norm.weight"] = 2 * torch.randn(size)
    if fc_norm:
        weights |= {f"fc_norm.{i}.weight": torch.rand(size) * (i + 1) for i in range(2)}
    folder = write(tmp_path / "head", config, weights | {"d2t": IDS - torch.arange(len(IDS))})
    drafted, committed = draft(tiny_target, folder, method="eagle")

    target = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    like = LlamaConfig(hidden_size=size, head_dim=WIDTH, num_attention_heads=HEADS, intermediate_size=INNER,
                       rope_parameters={"rope_type": "default", "rope_theta": 1000.0})  # fmt: skip
    published = Published(like, fc_norm)
    published.load_state_dict({name: weight for name, weight in weights.items() if name != "d2t"})
    with torch.no_grad():
        hidden = target(torch.tensor([committed[:-1]]), output_hidden_states=True).hidden_states
    about = committed, [hidden[1][0], hidden[2][0]], target.get_input_embeddings(), len(drafted)
    assert drafted == published.draft(*about, norm_output)
    assert drafted != published.draft(*about, not norm_output)


def test_a_norm_that_a_config_names_is_there(tiny_target, tmp_path):
    config = config_of(Path(tiny_target), "dflash", eagle_aux_hidden_state_layer_ids=[1, 2], fc_norm=True)
    weights = eagle_weights(config["hidden_size"], config["vocab_size"], IDS)
    folder = write(tmp_path / "head", config, weights | {"d2t": IDS - torch.arange(len(IDS))})
    refused(ModelError, "fc_norm.0.weight has shape None", draft, tiny_target, folder, method="eagle")
