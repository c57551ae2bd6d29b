"""Text that a target generates, for distillation."""

import inspect
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from forerun.core.errors import ConfigError
from forerun.core.folders import replace_with
from forerun_lab.tune.loop import wait_while_paused
from forerun_lab.tune.progress import progress

PROMPT = 64  # tokens of the corpus before each continuation
CONTINUATION = 447  # tokens written after it
ROWS = 64  # continuations written together, at most


def cache_keyword(model: PreTrainedModel) -> str:
    """The name of the KV cache in its forward: `cache` from transformers 5.24 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.inference_mode()
def continue_prompts(
    model: PreTrainedModel, prompts: Tensor, tokens: int, temperature: float, seed: int, pause_file: Path | None = None
) -> Tensor:
    """Prompts, int64 [rows, length], with `tokens` new tokens each, [rows, length + tokens]; 0 is greedy. An
    end-of-text token does not stop a row: the next document follows, as in training sequences."""
    generator = torch.Generator().manual_seed(seed)
    cache = {cache_keyword(model): DynamicCache(config=model.config)}
    text, feed = [prompts], prompts
    for _ in range(tokens):
        wait_while_paused(pause_file)
        logits = model(input_ids=feed, **cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        if temperature > 0:
            feed = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            feed = logits.argmax(-1, keepdim=True)
        text.append(feed)
    return torch.cat(text, dim=1)


def rollout_stream(
    model: PreTrainedModel,
    stream: Tensor,
    tokens: int,
    temperature: float,
    seed: int,
    folder: Path,
    pause_file: Path | None = None,
    shown: bool = False,
) -> Tensor:
    """About `tokens` tokens of continuations of random places of a corpus, int32 [tokens], their prompts included.
    Every batch is cached in `folder`."""
    length = PROMPT + CONTINUATION
    generator = torch.Generator().manual_seed(seed)
    rows = min(ROWS, max(1, round(tokens / length)))
    rounds = max(1, round(tokens / (rows * length)))
    parts = []
    with progress(f"writing text at temperature {temperature:.0f}, tokens", rounds * rows * length, shown) as bar:
        for number in range(rounds):
            starts = torch.randint(len(stream) - PROMPT, (rows,), generator=generator)
            path = folder / f"{temperature:.0f}-{number}.pt"
            if not path.exists():
                prompts = torch.stack([stream[start : start + PROMPT] for start in starts.tolist()]).long()
                text = continue_prompts(model, prompts, CONTINUATION, temperature, seed + number, pause_file)
                save(text.flatten().int(), path)
            parts.append(read(path))
            bar.update((number + 1) * rows * length)
    return torch.cat(parts)


def save(text: Tensor, path: Path) -> None:
    """Write token ids, int32 [tokens], atomically."""
    replace_with(path, lambda temporary: torch.save(text, temporary))


def read(path: Path) -> Tensor:
    """Token ids of an earlier run, int32 [tokens]."""
    try:
        text = torch.load(path, weights_only=True)
    except (OSError, UnpicklingError, RuntimeError) as error:
        raise ConfigError(f"{path} is not the generated text of a run: {str(error).splitlines()[0]}") from error
    if not isinstance(text, Tensor) or text.dtype != torch.int32 or text.ndim != 1:
        raise ConfigError(f"{path} is not the generated text of a run: it must hold one int32 vector of token ids")
    return text
