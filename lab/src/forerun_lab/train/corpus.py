"""Text files to tokens, and how training sequences are cut from them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from forerun.core.errors import ConfigError
from forerun_lab.train.files import Document, read_text


def encode_files(files: Sequence[Document], tokenizer: PreTrainedTokenizerBase, seed: int) -> Tensor:
    """One stream of token ids, int32 [tokens]: the files in shuffled order, each followed by the EOS token."""
    order = random.Random(seed).sample(range(len(files)), len(files))
    stream: list[int] = []
    for index in order:
        stream.extend(tokenizer.encode(read_text(files[index]), add_special_tokens=False, verbose=False))
        stream.append(tokenizer.eos_token_id)
    return torch.tensor(stream, dtype=torch.int32)


def whole_rows(stream: Tensor, length: int) -> Tensor:
    """A stream cut into whole rows, int64 [rows, length]; one short row if that is all there is."""
    length = min(length, len(stream))
    return stream[: len(stream) // length * length].long().view(-1, length)


@dataclass(frozen=True)
class TokenStream:
    """Training sequences cut from a stream of tokens; which ones is a function of the tokens consumed so far. There is
    no state to save: every epoch is a permutation of the stream's windows, keyed by seed, epoch and length, with the
    windows' borders at a new place in every epoch."""

    tokens: Tensor  # int32 [tokens]
    seed: int

    def batch(self, consumed: int, rows: int, length: int) -> Tensor:
        """Token ids, int64 [rows, length + 1]: inputs and, one to the right, their labels."""
        windows = (len(self.tokens) - length - 1) // length
        if windows < 1:
            raise ConfigError(
                f"the corpus has {len(self.tokens)} tokens, too few for sequences of {length}: give more text, or ask "
                "for shorter ones"
            )
        first = consumed // length
        return torch.stack([self._window(number, windows, length) for number in range(first, first + rows)])

    def _window(self, number: int, windows: int, length: int) -> Tensor:
        epoch, index = divmod(number, windows)
        generator = torch.Generator().manual_seed(hash((self.seed, epoch, length)) % 2**63)
        border = int(torch.randint(length, (1,), generator=generator))
        start = border + length * int(torch.randperm(windows, generator=generator)[index])
        return self.tokens[start : start + length + 1].long()
