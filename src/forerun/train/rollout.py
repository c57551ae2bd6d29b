"""Text that a target writes, to distil from."""

from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from forerun.train.loop import wait_while_paused

PROMPT = 64  # tokens of the corpus before each continuation
CONTINUATION = 447  # tokens written after it
ROWS = 64  # continuations written together


@torch.inference_mode()
def continue_prompts(
    model: PreTrainedModel, prompts: Tensor, tokens: int, temperature: float, seed: int, pause_file: Path | None = None
) -> Tensor:
    """Prompts, int64 [rows, length], with `tokens` new tokens each, [rows, length + tokens]; 0 is greedy.

    An end-of-text token does not stop a row: the next document follows, as in training sequences.
    """
    generator = torch.Generator().manual_seed(seed)
    cache = DynamicCache(config=model.config)
    text, feed = [prompts], prompts
    for _ in range(tokens):
        wait_while_paused(pause_file)
        logits = model(input_ids=feed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
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
    pause_file: Path | None = None,
    progress: bool = False,
) -> Tensor:
    """About `tokens` tokens of continuations of random places of a corpus, int32 [tokens], their prompts included."""
    length = PROMPT + CONTINUATION
    generator = torch.Generator().manual_seed(seed)
    rounds = max(1, round(tokens / (ROWS * length)))
    parts = []
    title = f"writing text at temperature {temperature:.0f}"
    for number in track(range(rounds), title, disable=not progress):
        starts = torch.randint(len(stream) - PROMPT, (ROWS,), generator=generator)
        prompts = torch.stack([stream[start : start + PROMPT] for start in starts.tolist()]).long()
        text = continue_prompts(model, prompts, CONTINUATION, temperature, seed + number, pause_file)
        parts.append(text.flatten())
    return torch.cat(parts).int()
