"""Trains an EAGLE head for a model on a GPU in some eight minutes: ``python head_on_gpu.py MODEL --out FOLDER``.

The model writes turns and answers (transformers, bfloat16, 2,048 at a time), its hidden states stay in the GPU's
memory, and the head learns with the losses and the loop of ``forerun tune``. FOLDER gets the head packed in Q4_0, the
loop's log and the answers. ``forerun tune`` does the same on a CPU, beside it chooses and checks.
"""

import argparse
import random
import tempfile
import time
from itertools import accumulate, islice
from pathlib import Path

import torch

from forerun.core.errors import RequestError
from forerun.models.chat import render_chat
from forerun.models.load import resolve
from forerun.models.tokenizer import encode
from forerun.speculate.draft.heads import eagle
from forerun.tune import kinds, loop
from forerun.tune.config import LoopSettings
from forerun.tune.data import FOLLOW_UPS, SPOKEN, held_out, save_part, turns
from forerun.tune.features import Features
from forerun.tune.kinds import EAGLE, MEANING, Trainer, drafted, layers
from forerun.tune.state import load_target

ANSWER, TURN, PROMPT, READ = 256, 96, 448, 128
"""Most tokens of an answer, of a turn that the model makes up and of a prompt; texts that are read together."""


class Model:
    """The target and its tokenizer, as a writer of conversations."""

    def __init__(self, path: Path, device: str, rows: int) -> None:
        target, self.tokenizer = load_target(path)
        self.target, self.device, self.rows = target.to(device), device, rows
        self.target.config._attn_implementation = "sdpa"
        ends = self.target.config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self.ends = sorted({*ends, self.tokenizer.eos_token_id} - {None})

    def rendered(self, talk):
        return encode(self.tokenizer, render_chat(self.tokenizer, talk), add_special_tokens=False)

    @torch.inference_mode()
    def write(self, prompts, temperature, most):
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

    def turns(self, count):
        """What the model itself says where its template lets a user speak."""
        before = render_chat(self.tokenizer, [{"role": "user", "content": SPOKEN}]).partition(SPOKEN)[0]
        lead = encode(self.tokenizer, before, add_special_tokens=False)
        ended = [ids for ids in self.write([lead] * count, 1.0, TURN) if ids[-1] in self.ends]
        texts = (self.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in ended)
        return [text for text in texts if text]

    @torch.inference_mode()
    def features(self, texts, folder):
        """Hidden states of texts (ids, tokens of the prompt), as ``Features`` reads them."""
        which = layers(self.target.config)
        lengths = [len(ids) for ids, _ in texts]
        starts = list(accumulate(lengths, initial=0))
        width = len(which) * self.target.config.hidden_size
        hidden = torch.zeros(sum(lengths), width, dtype=torch.bfloat16, device=self.device)
        order = sorted(range(len(texts)), key=lengths.__getitem__)
        for at in range(0, len(order), READ):
            some = order[at : at + READ]
            ids = torch.full((len(some), max(lengths[i] for i in some)), self.ends[0])
            for row, i in enumerate(some):
                ids[row, : lengths[i]] = torch.tensor(texts[i][0])
            every = self.target.model(ids.to(self.device), output_hidden_states=True, use_cache=False).hidden_states
            wide = torch.cat([every[layer] for layer in which], dim=-1).to(torch.bfloat16)
            for row, i in enumerate(some):
                hidden[starts[i] : starts[i] + lengths[i] - 1] = wide[row, : lengths[i] - 1]
        folder.mkdir()
        tokens = torch.tensor([token for ids, _ in texts for token in ids], dtype=torch.int32)
        counts = torch.tensor([prompt for _, prompt in texts], dtype=torch.int32)
        part = {
            "layers": which,
            "tokens": tokens,
            "lengths": torch.tensor(lengths, dtype=torch.int32),
            "prompts": counts,
        }
        save_part({**part, "hidden": hidden.cpu()}, folder / "0.pt")
        return Features(folder, device=self.device)


def conversations(model, seconds, draw):
    """Texts (ids, tokens of the prompt) that the model writes in so many seconds, at temperatures 0 and 1 in turn; each
    fourth batch goes on with answers of the one before."""
    source, texts, answered, began, number = turns(draw.randrange(1 << 30), []), [], [], time.monotonic(), 0
    while time.monotonic() - began < seconds:
        said = model.turns(model.rows // 2)
        said += [turn for _, turn in islice(source, model.rows - len(said))]
        talks = [[{"role": "user", "content": turn}] for turn in said]
        if number % 4 == 3:
            some = draw.sample(answered, min(len(answered), model.rows // 2))
            talks[model.rows // 2 :] = [[*talk, {"role": "user", "content": draw.choice(FOLLOW_UPS)}] for talk in some]
        pairs = []
        for talk in talks:
            try:
                prompt = model.rendered(talk)
            except RequestError:  # the template refuses it
                continue
            if len(prompt) <= PROMPT:
                pairs.append((talk, prompt))
        answers = model.write([prompt for _, prompt in pairs], float(number % 2), ANSWER)
        answered = []
        for (talk, prompt), answer in zip(pairs, answers, strict=True):
            texts.append(([*prompt, *answer], len(prompt)))
            text = model.tokenizer.decode(answer, skip_special_tokens=True)
            answered.append([*talk, {"role": "assistant", "content": text}])
        number += 1
        print(f"{len(texts)} texts, {sum(len(ids) - n for ids, n in texts):,} tokens of answers", flush=True)
    return texts


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
    kinds.LEARNT, eagle.LEAST = 4, 1
    model, draw = Model(resolve(asked.model), device, asked.together), random.Random(0)
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        prompts = [model.rendered([{"role": "user", "content": turn}]) for _, turn in held_out()]
        prompts = [prompt for prompt in prompts if len(prompt) <= PROMPT]
        kept = [
            ([*prompt, *answer], len(prompt))
            for temperature in (0.0, 1.0)
            for prompt, answer in zip(prompts, model.write(prompts, temperature, ANSWER), strict=True)
        ]
        test = model.features(kept, Path(place) / "held")
        train = model.features(conversations(model, asked.write, draw), Path(place) / "text")
        ids = drafted(model.target, train, asked.rows)
        trainer, kind = Trainer(model.target, train, test, ids), EAGLE
        draft = kind.fitted(model.target, train, ids, 400_000)
        print(loop.described(loop.looked_at(trainer.evaluate, draft)), flush=True)
        settings = LoopSettings(
            out=asked.out / "training", tokens=10**10, seconds=asked.train, batch_tokens=asked.batch,
            micro_tokens=asked.batch, long_share=0.0, matrix_lr=kind.matrix_lr, lr=kind.lr, weight_decay=0.0,
            warmup_share=0.03, decay_share=0.6, threads=0, eval_tokens=400 * asked.batch, checkpoint_seconds=1e9,
            resume=False,
        )  # fmt: skip
        done = loop.run(draft, train, trainer.loss, settings, trainer.evaluate, MEANING)
        figures = loop.looked_at(trainer.evaluate, draft)
        print(loop.described(figures), flush=True)
        record = {"target": asked.model, "tokens": done.tokens, **figures}
        kind.export(draft, asked.out / "eagle", model.tokenizer, record)
    head = eagle.EagleHead.load(asked.out / "eagle")
    head.save(asked.out / "packed", head.record, packed=True)


if __name__ == "__main__":
    main()
