"""Gemma 4's assistant, a form of ``mtp``: a small decoder of queries alone that reads the target's cache.

Its first input is the embedding of the last token and the hidden state of the target before it; a deeper one is that
of the token that it drafted, and its own output. Each of its layers reads the keys and values of the last layer of the
same kind in the target. It has no cache, and all its queries have the position of the last token: it drafts right after
a prefix hit, and a row does not depend on the rows beside it.

Read are folders as transformers saves ``Gemma4AssistantForCausalLM``, and GGUF files of llama.cpp's architecture
``gemma4-assistant``. With ``use_ordered_embeddings`` the output layer looks at the tokens of the likeliest clusters
alone; others get one less than the least of their logits. llama.cpp's converter leaves the clusters out: all tokens are
predicted then.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from forerun.attention.base import Attention, Backend, Metadata, Query
from forerun.attention.kernel import AttentionPlan, KernelAttention, plan_reads
from forerun.core.batch import Batch, Output, Span
from forerun.core.config import COUNT
from forerun.core.errors import ConfigError, ModelError, shown
from forerun.core.inference import inference
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft, Drafts, Verdicts
from forerun.models.architectures.families import GEMMA4
from forerun.models.architectures.spec import READS_TARGET, refusal
from forerun.models.base import LoadRequest, Model
from forerun.models.checkpoint import CONFIG, read_object
from forerun.models.formats import choose, make_linear
from forerun.models.gguf import GGUFFile, is_gguf, open_gguf
from forerun.models.gguf_config import read_config as read_metadata
from forerun.models.kinds import UNQUANTIZED
from forerun.models.native import NativeModel
from forerun.models.open import Files, as_config, open_files, read_config, resolve
from forerun.models.transform import transform
from forerun.speculate.draft.base import Chooser, DraftContext, Drafter, Needs, scatter_logits
from forerun.speculate.draft.heads.mtp import MtpConfig, predicted
from forerun.speculate.draft.levels import Frontier, grow
from forerun.speculate.verify import Verification

KIND, GGUF_KIND = "gemma4_assistant", "gemma4-assistant"
SIZES = {"backbone_hidden_size": 1536, "num_centroids": 2048, "centroid_intermediate_top_k": 32}
"""Config keys and what they are where files leave them out."""


def is_assistant(path: Path) -> bool:
    """Whether the folder or the file ``path`` holds such a drafter."""
    if is_gguf(path):
        return open_gguf(path).metadata.get("general.architecture") == GGUF_KIND
    about = path / CONFIG
    return about.is_file() and read_object(about).get("model_type") == KIND


def _as_decoder(file: GGUFFile) -> GGUFFile:
    """The decoder in an assistant's file, as that of a model that predicts no further tokens."""
    result, begin = copy.copy(file), f"{GGUF_KIND}."
    given = {key.replace(begin, f"{GEMMA4.gguf}.", 1): value for key, value in file.metadata.items()}
    result.metadata = {**given, "general.architecture": GEMMA4.gguf, f"{GEMMA4.gguf}.nextn_predict_layers": 0}
    own = ("nextn.", "masked_embd_")
    result.tensors = {name: tensor for name, tensor in file.tensors.items() if not name.startswith(own)}
    return result


class Clusters:
    """The output layer that looks at some tokens alone: those of the ``chosen`` clusters whose centroids [clusters,
    width] fit best. ``tokens`` int64 [clusters, size] are theirs, ``rows`` [vocabulary, width] the tokens' weights."""

    def __init__(self, centroids: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, chosen: int) -> None:
        self.centroids, self.tokens, self.rows, self.chosen = centroids, tokens, rows, chosen

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Float32 logits [n, vocabulary] of x [n, width]."""
        best = (x @ self.centroids.T).topk(self.chosen, dim=-1).indices
        ids = self.tokens[best].flatten(1)
        logits = (self.rows[ids] @ x[:, :, None])[..., 0].float()
        least = logits.min(dim=-1, keepdim=True).values - 1.0
        return least.expand(-1, len(self.rows)).scatter(1, ids, logits)


class AssistantModel:
    """The decoder and the projections around it."""

    def __init__(self, path: Path, target: NativeModel, ids: torch.Tensor | None, quantization: str | None) -> None:
        """``ids`` int64: the tokens that it predicts; None: all. Raises ModelError for a folder that does not fit."""
        info = target.info
        file = _as_decoder(open_gguf(path)) if is_gguf(path) else None
        text = read_config(path) if file is None else as_config(path, read_metadata(file))
        sizes = _sizes(path)
        setattr(text, READS_TARGET, True)
        text.final_logit_softcapping = None  # transformers has none here
        text.sliding_window += 1  # it counts from the position before the query
        if text.model_type != GEMMA4.model_type or (reason := refusal(text)) is not None:
            reason = text.model_type if text.model_type != GEMMA4.model_type else reason
            raise ModelError(f"{path}: Gemma 4's assistant is a decoder of Gemma 4's layers, not {reason}")
        if text.num_kv_shared_layers != text.num_hidden_layers:
            raise ModelError(f"{path}: {text.num_kv_shared_layers} of its {text.num_hidden_layers} layers read the "
                             "target's keys and values; in Gemma 4's assistant all do")  # fmt: skip
        made_for = sizes["backbone_hidden_size"], text.vocab_size
        if made_for != (info.hidden_size, info.vocab_size):
            raise ModelError(
                f"{path} was trained for a target of hidden size {made_for[0]} and {made_for[1]} tokens; {info.name} "
                f"has {info.hidden_size} and {info.vocab_size}"
            )
        files, begin = open_files(path), "" if file is None else "nextn."
        weights = transform(files if file is None else file, text)
        ordered = file is None and read_object(path / CONFIG).get("use_ordered_embeddings")
        self.clusters = _clusters(path, text, sizes, files, info.dtype, info.device) if ordered else None
        self.ids = None if self.clusters is not None else ids
        requested = LoadRequest(
            folder=path, name=str(path), dtype=info.dtype, device=info.device, quantization=quantization,
            outputs=self.ids,
        )  # fmt: skip
        self.decoder = NativeModel(text, weights, requested)
        self.layers = _sources(path, self.decoder, target)
        how, size = choose(info.dtype, info.device, "auto"), self.decoder.info.hidden_size

        def linear(name: str, shape: tuple[int, int]) -> Any:
            weight = _tensor(path, files, f"{name}.weight", shape)
            return make_linear(weight.to(info.device, info.dtype), None, how)

        self.before = linear(f"{begin}pre_projection", (size, 2 * info.hidden_size))
        self.after = linear(f"{begin}post_projection", (info.hidden_size, size))

    def logits(self, out: Output, x: torch.Tensor) -> torch.Tensor:
        """Float32 [n, vocabulary] of its normed states x; tokens that it does not predict are impossible."""
        if self.clusters is not None:
            return self.clusters(x)
        if self.ids is None:
            return out.logits
        return scatter_logits(out.logits, self.ids, self.decoder.info.vocab_size)


def _tensor(path: Path, files: Files, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if name not in files.tensors:
        raise ModelError(f"{path} holds no whole assistant: it lacks {name}")
    result = files.values(name).float()
    if result.shape != shape:
        raise ModelError(f"{path}: {name} has shape {[*result.shape]}; its config asks for {[*shape]}")
    return result


def _sizes(path: Path) -> dict[str, int]:
    if is_gguf(path):
        given = {"backbone_hidden_size": open_gguf(path).metadata.get(f"{GGUF_KIND}.embedding_length_out")}
    else:
        given = read_object(path / CONFIG)
    result: dict[str, Any] = {name: given.get(name, usual) for name, usual in SIZES.items()}
    for name, value in result.items():
        if not COUNT.permits(value):
            raise ModelError(f"{path} has {shown(value)} as {name}, not a positive integer")
    return result


def _clusters(
    path: Path, text: Any, sizes: Mapping[str, int], files: Files, dtype: torch.dtype, device: torch.device
) -> Clusters:
    count, chosen = sizes["num_centroids"], sizes["centroid_intermediate_top_k"]
    tokens, width = text.vocab_size, text.hidden_size
    if tokens % count or chosen > count:
        raise ModelError(f"{path}: {count} clusters, of which {chosen} are chosen, do not divide {tokens} tokens")
    centroids = _tensor(path, files, "masked_embedding.centroids.weight", (count, width)).to(device, dtype)
    order = _tensor(path, files, "masked_embedding.token_ordering", (tokens,)).long()
    if not torch.equal(order.sort().values, torch.arange(tokens)):
        raise ModelError(f"{path}: masked_embedding.token_ordering does not name each of {tokens} tokens once")
    rows = _tensor(path, files, "model.embed_tokens.weight", (tokens, width)).to(device, dtype)
    return Clusters(centroids, order.view(count, -1).to(device), rows, chosen)


def _sources(path: Path, decoder: NativeModel, target: NativeModel) -> list[int]:
    """The target's layer that each layer reads. Raises ModelError where their keys do not fit."""
    last: Mapping[str | None, int] = {
        layer.rotary: index for index, layer in enumerate(target.spec.layers) if layer.kv_source is None
    }
    for layer in decoder.spec.layers:
        at = last.get(layer.rotary)
        theirs = None if at is None else target.spec.layers[at].heads
        if theirs != layer.heads or decoder.spec.heads % (layer.heads or (1, 1))[0]:
            raise ModelError(f"{path}: its {layer.rotary} reads key-value heads (number, width) {layer.heads}; "
                             f"{target.info.name} has {theirs} there")  # fmt: skip
    return [last[layer.rotary] for layer in decoder.spec.layers]


class TargetReader(Backend[Metadata]):
    """Over the cache of ``attention``: layer i reads what that has for layer ``layers[i]``. Every span is one row; it
    sees its sequence's ``start`` entries, the last ``window`` of them, and nothing else. Nothing is stored, and no
    length changes."""

    def __init__(self, attention: Attention, layers: Sequence[int]) -> None:
        super().__init__(attention.pool)
        self.layers = tuple(layers)

    def begin(self, batch: Batch) -> Metadata:
        _check_single(batch)
        return Metadata(batch)

    def run(self, query: Query, metadata: Metadata) -> torch.Tensor:
        layer = self.layers[query.layer]
        parts = [self._row(layer, query, row, span.key, span.start) for row, span in enumerate(metadata.batch.spans)]
        return torch.stack(parts)

    def _row(self, layer: int, query: Query, row: int, key: int, end: int) -> torch.Tensor:
        pages = torch.tensor(self.pool.block_tables[key], device=query.q.device)
        first = max(0, end - query.window) if query.window else 0
        k, v = (side[:, first:end] for side in self.pool.gather(layer, pages))
        q = query.q[row].unflatten(0, (k.shape[0], -1))  # [kv heads, group, width]
        return F.scaled_dot_product_attention(q, k, v, scale=query.scale).flatten()

    def finish(self, metadata: Metadata) -> None:
        """No entries were added."""


class KernelTargetReader(KernelAttention):
    """As ``TargetReader``, on the kernel."""

    def __init__(self, attention: Attention, layers: Sequence[int]) -> None:
        super().__init__(attention.pool)
        self.layers = tuple(layers)

    def begin(self, batch: Batch) -> AttentionPlan:
        _check_single(batch)
        return plan_reads(batch, [(self.pool.block_tables[span.key], span.start) for span in batch.spans])

    def run(self, query: Query, plan: AttentionPlan) -> torch.Tensor:
        return self.read(self.pool, self.layers[query.layer], query.q, query.scale, plan, query.window or 0)

    def finish(self, metadata: AttentionPlan) -> None:
        """No entries were added."""


def _check_single(batch: Batch) -> None:
    if any(span.count != 1 for span in batch.spans):
        raise ValueError("a span that reads another model's entries is one row")


class Assistant(Drafter[MtpConfig]):
    name = "mtp"
    config_class = MtpConfig
    per_sequence = ("states",)
    states: dict[int, tuple[int, torch.Tensor]]
    """How many tokens of a sequence the target has read, and its last hidden state [hidden size]."""

    def __init__(self, config: MtpConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        context.require_decoder(self.name)
        path, target = resolve(config.model or ""), context.target
        if not isinstance(target, NativeModel) or target.spec.architecture is not GEMMA4:
            raise ConfigError(
                f"{path} is Gemma 4's assistant, which reads the cache of a Gemma 4 on the native path, and "
                f"{target.info.name} is {target.info.architecture} ({target.info.path})"
            )
        kind = None if config.quantization in (None, UNQUANTIZED) else config.quantization
        self.model = AssistantModel(path, target, predicted(config, context), kind)
        if self.model.clusters is not None and config.draft_vocab_size is not None:
            raise ConfigError(f"{path} predicts the tokens of its likeliest clusters: remove draft_vocab_size")
        self.needs = Needs(hidden=(target.info.num_layers,), model=True)
        self.chooser = Chooser.of(config, context)
        self.attention: TargetReader | KernelTargetReader | None = None

    @inference
    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        ready = [
            index
            for index, sequence in enumerate(sequences)
            if sequence.id in self.states and self.states[sequence.id][0] == len(sequence.tokens) - 1
        ]
        said: dict[tuple[int, int], torch.Tensor] = {}
        """What each row makes for the rows behind it."""

        def score(depth: int, frontier: Frontier, drafts: Drafts) -> torch.Tensor:
            tokens, features = [], []
            for index, node in frontier:
                sequence, draft = sequences[index], drafts[index]
                tokens.append(draft.tokens[node] if depth else sequence.tokens[-1])
                features.append(said[index, draft.parents[node]] if depth else self.states[sequence.id][1])
            chosen = [sequences[index] for index, _ in frontier]
            logits, states = self._run(chosen, tokens, torch.stack(features))
            said.update(zip(frontier, states))
            return logits

        return grow(sequences, ready, budgets, self.config, self.chooser, score)[0]

    def _run(
        self, chosen: Requests, tokens: Sequence[int], features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and what the next step feeds on, of one row for each of ``tokens``."""
        model, target = self.model, self.context.target
        if self.attention is None:
            theirs = self.context.attention()
            reading = KernelTargetReader if isinstance(theirs, KernelAttention) else TargetReader
            self.attention = reading(theirs, model.layers)
        device, last = target.info.device, model.decoder.info.num_layers
        embedded = target.embed(torch.tensor(tokens, device=device))
        given = model.before(torch.cat([embedded, features.to(embedded.dtype)], dim=-1))
        asked = [0] if model.clusters is None else []
        spans = [Span(s.id, len(s.tokens) - 1, [token], logits=asked) for s, token in zip(chosen, tokens)]
        batch = Batch(spans, device, hidden=(last,), embeds=given, embed_rows=list(range(len(tokens))))
        out = model.decoder.forward(batch, self.attention)
        return model.logits(out, out.hidden[last]), model.after(out.hidden[last])

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        for sequence, verdict in zip(sequences, verdicts):
            if verdict.hidden is None or verdict.error is not None:
                continue
            rows = verdict.hidden[self.context.target.info.num_layers]
            if len(rows):
                self.states[sequence.id] = sequence.num_computed_tokens, rows[-1].clone()

    def models(self) -> list[Model]:
        return [self.model.decoder]

    def reusable(self, sequence: RequestState) -> int:
        return len(sequence.tokens)

    def cached_tokens(self, sequence: RequestState) -> list[int]:
        return sequence.tokens[: self.states[sequence.id][0]] if sequence.id in self.states else []
