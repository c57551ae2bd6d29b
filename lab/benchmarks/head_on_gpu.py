"""Trains an EAGLE head for a model on a GPU in some eight minutes: ``python head_on_gpu.py MODEL --out FOLDER``.

The model writes (transformers, bfloat16, 2,048 texts at a time) what ``forerun tune`` has it write, and the head learns
with its losses and its loop. FOLDER gets the head packed in Q4_0 and the loop's log. ``forerun tune`` does the same on
a CPU, and chooses and checks besides.
"""

import argparse
import tempfile
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import torch

from forerun.models.files.open import resolve
from forerun.speculate.draft.heads import eagle
from forerun_lab.tune import kinds, loop
from forerun_lab.tune.config import LoopSettings
from forerun_lab.tune.data import Data
from forerun_lab.tune.features import Features, Writer, save_part
from forerun_lab.tune.kinds import EAGLE, LOSS_LABEL, Trainer, draft_vocabulary, feature_layers
from forerun_lab.tune.state import load_target

ANSWER, PROMPT, READ = 256, 448, 128
"""Most tokens of an answer and of a prompt; texts that are read together."""


class Record:
    """Hidden states of texts by their tokens, as ``HiddenStateRecorder`` keeps them."""

    def __init__(self, which: list[int]) -> None:
        self.config = SimpleNamespace(layers=which)
        self.done: dict[tuple[int, ...], torch.Tensor] = {}

    def take(self, ids):
        return self.done.pop(tuple(ids), None)


class Model:
    """The target in transformers, with what ``Writer`` asks of an engine."""

    def __init__(self, path: Path, device: str, rows: int) -> None:
        target, self.tokenizer = load_target(path)
        self.target, self.device, self.rows = target.to(device), device, rows
        self.target.config._attn_implementation = "sdpa"
        self.model = SimpleNamespace(info=SimpleNamespace(hidden_size=target.config.hidden_size))
        self.record = Record(feature_layers(target.config))
        ends = self.target.config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self.ends = sorted({*ends, self.tokenizer.eos_token_id} - {None})

    def generate(self, prompts, params, use_tqdm):
        """An answer to each prompt; all have the first one's temperature and length. Hidden states are recorded."""
        answers = self._write(prompts, params[0].temperature, params[0].max_tokens)
        self._read([[*prompt, *answer] for prompt, answer in zip(prompts, answers)])
        return [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(
                        token_ids=answer,
                        text=self.tokenizer.decode(answer, skip_special_tokens=True),
                        finish_reason="stop" if answer[-1] in self.ends else "length",
                    )
                ]
            )
            for answer in answers
        ]

    @torch.inference_mode()
    def _write(self, prompts, temperature, most):
        """Token ids of an answer to each prompt."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        answers = [[] for _ in prompts]
        for at in range(0, len(order), self.rows):
            some = order[at : at + self.rows]
            longest = max(len(prompts[i]) for i in some)
            ids = torch.full((len(some), longest), self.ends[0])
            mask = torch.zeros_like(ids)
            for row, i in enumerate(some):
                ids[row, longest - len(prompts[i]) :] = torch.tensor(prompts[i])
                mask[row, longest - len(prompts[i]) :] = 1
            sampling = (
                {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
            )
            result = self.target.generate(
                ids.to(self.device), attention_mask=mask.to(self.device), max_new_tokens=most,
                pad_token_id=self.ends[0], eos_token_id=self.ends, **sampling,
            )  # fmt: skip
            for i, answer in zip(some, result[:, longest:].tolist(), strict=True):
                end = next((n + 1 for n, token in enumerate(answer) if token in self.ends), len(answer))
                answers[i] = answer[:end]
        return answers

    @torch.inference_mode()
    def _read(self, texts):
        """Records the hidden states of all tokens of a text but the last."""
        texts = sorted(texts, key=len)
        for at in range(0, len(texts), READ):
            some = texts[at : at + READ]
            ids = torch.full((len(some), len(some[-1])), self.ends[0])
            for row, text in enumerate(some):
                ids[row, : len(text)] = torch.tensor(text)
            every = self.target.model(ids.to(self.device), output_hidden_states=True, use_cache=False).hidden_states
            wide = torch.cat([every[layer] for layer in self.record.config.layers], dim=-1).to(torch.bfloat16).cpu()
            self.record.done |= {tuple(text): rows[: len(text) - 1] for text, rows in zip(some, wide)}


def conversations(writer, seconds, folder):
    """What the model writes in so many seconds, at temperatures 0 and 1 in turn, a file a batch."""
    began, written = time.monotonic(), 0
    for number in count():
        if time.monotonic() - began >= seconds:
            return
        part = writer.write_part(number, float(number % 2))
        save_part(part, folder / f"{number:06}.pt")
        written += int((part["lengths"] - part["prompts"]).sum())
        print(f"{number + 1} batches, {written:,} tokens of answers", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--write", type=float, default=160.0, help="seconds of writing")
    parser.add_argument("--train", type=float, default=280.0, help="seconds of learning")
    parser.add_argument("--together", type=int, default=2048, help="conversations written together")
    parser.add_argument("--rows", type=int, default=8192, help="tokens that the head may draft")
    parser.add_argument("--batch", type=int, default=16384, help="tokens of a step")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kinds.EAGLE_DEPTH, eagle.LEAST = 4, 1
    model = Model(resolve(asked.model), device, asked.together)
    writer = Writer(model, model.record, Data(), rows=asked.together, answer=ANSWER, prompt=PROMPT)
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        held, text = Path(place) / "held", Path(place) / "text"
        held.mkdir()
        text.mkdir()
        save_part(writer.held_out_part(writer.held_out_prompts()), held / "0.pt")
        conversations(writer, asked.write, text)
        test, train = Features(held, device=device), Features(text, device=device)
        ids = draft_vocabulary(model.target, train, asked.rows)
        trainer, kind = Trainer(model.target, train, test, ids), EAGLE
        draft = kind.fitted(model.target, train, ids, 400_000)
        print(loop.shown(loop.evaluated(trainer.evaluate, draft)), flush=True)
        settings = LoopSettings(
            out=asked.out / "training", tokens=10**10, seconds=asked.train, batch_tokens=asked.batch,
            micro_tokens=asked.batch, long_share=0.0, matrix_lr=kind.matrix_lr, lr=kind.lr, weight_decay=0.0,
            warmup_share=0.03, decay_share=0.6, threads=0, eval_tokens=400 * asked.batch, checkpoint_seconds=1e9,
            resume=False,
        )  # fmt: skip
        done = loop.run(draft, train, trainer.loss, settings, trainer.evaluate, LOSS_LABEL)
        figures = loop.evaluated(trainer.evaluate, draft)
        print(loop.shown(figures), flush=True)
        record = {"target": asked.model, "tokens": done.tokens, **figures}
        kind.export(draft, asked.out / "eagle", model.tokenizer, record)
    head = eagle.EagleHead.load(asked.out / "eagle")
    head.save(asked.out / "packed", head.record, packed=True)


if __name__ == "__main__":
    main()
