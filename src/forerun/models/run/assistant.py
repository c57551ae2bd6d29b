"""The decoder of Gemma 4's assistant, a drafter without keys and values that reads the target's KV cache.

Each layer reads the keys and values of the target's last layer of the same kind. All queries have the position of the
last token, and rows do not depend on each other.

It reads folders of transformers' ``Gemma4AssistantForCausalLM`` and GGUF files of llama.cpp's architecture
``gemma4-assistant``. With ``use_ordered_embeddings``, the output layer scores only the tokens of the likeliest
clusters; all others get the lowest of these logits minus one. GGUF files have no clusters, so all tokens are scored.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from forerun.attention.base import Backend, Metadata, Query
from forerun.attention.kernel import AttentionPlan, KernelAttention, plan_reads
from forerun.cache.pool import Pool
from forerun.core.batch import Batch, Output
from forerun.core.config import COUNT
from forerun.core.errors import ModelError, shown
from forerun.models.architectures.families import GEMMA4
from forerun.models.architectures.spec import READS_TARGET, refusal
from forerun.models.files.checkpoint import CONFIG, read_object
from forerun.models.files.gguf import GGUFFile
from forerun.models.files.open import Checkpoint, Files
from forerun.models.formats import choose, make_linear
from forerun.models.run.base import LoadRequest
from forerun.models.run.native import NativeModel
from forerun.models.weights.transform import transform

KIND, GGUF_KIND = "gemma4_assistant", "gemma4-assistant"
SIZES = {"backbone_hidden_size": 1536, "num_centroids": 2048, "centroid_intermediate_top_k": 32}
"""Config keys and their defaults."""


def is_assistant(path: Path) -> bool:
    """Whether the folder or GGUF file ``path`` holds such a drafter."""
    if (file := Checkpoint.at(path).gguf) is not None:
        return file.metadata.get("general.architecture") == GGUF_KIND
    config = path / CONFIG
    return config.is_file() and read_object(config).get("model_type") == KIND


def _as_decoder(file: GGUFFile) -> GGUFFile:
    """The assistant's decoder as the GGUF file of a plain Gemma 4."""
    result, prefix = copy.copy(file), f"{GGUF_KIND}."
    metadata = {key.replace(prefix, f"{GEMMA4.gguf}.", 1): value for key, value in file.metadata.items()}
    result.metadata = {**metadata, "general.architecture": GEMMA4.gguf, f"{GEMMA4.gguf}.nextn_predict_layers": 0}
    own = ("nextn.", "masked_embd_")
    result.tensors = {name: tensor for name, tensor in file.tensors.items() if not name.startswith(own)}
    return result


class Clusters:
    """Output layer over the tokens of the ``top_k`` clusters with the best centroids [clusters, width]. ``tokens``
    int64 [clusters, size] are those of each cluster, ``rows`` [vocabulary, width] the output weights."""

    def __init__(self, centroids: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, top_k: int) -> None:
        self.centroids, self.tokens, self.rows, self.top_k = centroids, tokens, rows, top_k

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Float32 logits [n, vocabulary] of x [n, width]."""
        ids = self.tokens[(x @ self.centroids.T).topk(self.top_k, dim=-1).indices].flatten(1)
        logits = (self.rows[ids] @ x[:, :, None])[..., 0].float()
        lowest = logits.min(dim=-1, keepdim=True).values - 1.0
        return lowest.expand(-1, len(self.rows)).scatter(1, ids, logits)


class AssistantModel:
    """The assistant's decoder and the projections before and after it."""

    def __init__(self, path: Path, target: NativeModel, ids: torch.Tensor | None, quantization: str | None) -> None:
        """``ids`` int64: the tokens that it predicts; None: all. Raises ModelError if it does not fit the target."""
        info, opened = target.info, Checkpoint.at(path)
        decoder = opened if opened.gguf is None else Checkpoint(path, _as_decoder(opened.gguf))
        text, sizes = decoder.transformers_config(), _sizes(opened)
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
        files, begin = opened.files(), "" if opened.gguf is None else "nextn."
        weights = transform(decoder.files(), text)
        ordered = opened.gguf is None and opened.raw_config.get("use_ordered_embeddings")
        self.clusters = _clusters(path, text, sizes, files, info.dtype, info.device) if ordered else None
        self.ids = None if self.clusters is not None else ids
        requested = LoadRequest(
            folder=path, name=str(path), dtype=info.dtype, device=info.device, quantization=quantization,
            outputs=self.ids,
        )  # fmt: skip
        self.decoder = NativeModel(text, weights, requested)
        self.layers = _source_layers(path, self.decoder, target)
        how, size = choose(info.dtype, info.device, "auto"), self.decoder.info.hidden_size

        def linear(name: str, shape: tuple[int, int]) -> Any:
            return make_linear(_tensor(path, files, f"{name}.weight", shape).to(info.device, info.dtype), None, how)

        self.pre_projection = linear(f"{begin}pre_projection", (size, 2 * info.hidden_size))
        self.post_projection = linear(f"{begin}post_projection", (info.hidden_size, size))

    def logits(self, out: Output, x: torch.Tensor) -> torch.Tensor:
        """Float32 [n, tokens that it predicts] of the normed states x."""
        return out.logits if self.clusters is None else self.clusters(x)


def _tensor(path: Path, files: Files, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if name not in files.tensors:
        raise ModelError(f"{path} holds no whole assistant: it lacks {name}")
    result = files.values(name).float()
    if result.shape != shape:
        raise ModelError(f"{path}: {name} has shape {[*result.shape]}; its config asks for {[*shape]}")
    return result


def _sizes(opened: Checkpoint) -> dict[str, int]:
    if opened.gguf is not None:
        given = {"backbone_hidden_size": opened.gguf.metadata.get(f"{GGUF_KIND}.embedding_length_out")}
    else:
        given = opened.raw_config
    result: dict[str, Any] = {name: given.get(name, usual) for name, usual in SIZES.items()}
    for name, value in result.items():
        if not COUNT.permits(value):
            raise ModelError(f"{opened.path} has {shown(value)} as {name}, not a positive integer")
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


def _source_layers(path: Path, decoder: NativeModel, target: NativeModel) -> list[int]:
    """For each layer, the target's layer whose keys and values it reads. Raises ModelError if their shapes differ."""
    last: Mapping[str | None, int] = {
        layer.rotary: index for index, layer in enumerate(target.spec.layers) if layer.kv_source is None
    }
    for layer in decoder.spec.layers:
        source = last.get(layer.rotary)
        heads = None if source is None else target.spec.layers[source].heads
        if heads != layer.heads or decoder.spec.heads % (layer.heads or (1, 1))[0]:
            raise ModelError(f"{path}: its {layer.rotary} reads key-value heads (number, width) {layer.heads}; "
                             f"{target.info.name} has {heads} there")  # fmt: skip
    return [last[layer.rotary] for layer in decoder.spec.layers]


class TargetReader(Backend[Metadata]):
    """Attention over the target's cache: layer i reads the target's layer ``layers[i]``. Every span is one row, which
    attends to its sequence's first ``start`` entries, or the last ``window`` of them. Nothing is written."""

    def __init__(self, pool: Pool, layers: Sequence[int]) -> None:
        super().__init__(pool)
        self.layers = layers

    def begin(self, batch: Batch) -> Metadata:
        _check_single(batch)
        return Metadata(batch)

    def run(self, query: Query, metadata: Metadata) -> torch.Tensor:
        layer = self.layers[query.layer]
        rows = [self._row(layer, query, row, span.key, span.start) for row, span in enumerate(metadata.batch.spans)]
        return torch.stack(rows)

    def _row(self, layer: int, query: Query, row: int, key: int, end: int) -> torch.Tensor:
        pages = torch.tensor(self.pool.block_tables[key], device=query.q.device)
        first = max(0, end - query.window) if query.window else 0
        k, v = (side[:, first:end] for side in self.pool.gather(layer, pages))
        q = query.q[row].unflatten(0, (k.shape[0], -1))  # [kv heads, group, width]
        return F.scaled_dot_product_attention(q, k, v, scale=query.scale).flatten()

    def finish(self, metadata: Metadata) -> None:
        """No entries were added."""


class KernelTargetReader(KernelAttention):
    """``TargetReader`` on the kernel."""

    def begin(self, batch: Batch) -> AttentionPlan:
        _check_single(batch)
        return plan_reads(batch, [(self.pool.block_tables[span.key], span.start) for span in batch.spans])

    def run(self, query: Query, plan: AttentionPlan) -> torch.Tensor:
        return self.read(self.pool, self.layers[query.layer], query.q, query.scale, plan, query.window or 0)

    def finish(self, metadata: Metadata) -> None:
        """No entries were added."""


def _check_single(batch: Batch) -> None:
    if any(span.count != 1 for span in batch.spans):
        raise ValueError("a span that reads another model's entries is one row")
