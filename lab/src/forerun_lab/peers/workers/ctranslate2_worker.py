"""CTranslate2: beams of an encoder-decoder, converted from its checkpoint in a folder of its own.

The converter needs transformers and torch, of this environment or of one that a .pth file lends it.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

BART = {"normalize_before": False, "normalize_embedding": True}
"""Keys of a BART config that the converter needs and transformers no longer writes."""


def converted(checkpoint: Path, folder: Path) -> Path:
    """Convert the checkpoint for CTranslate2. Missing special tokens become the decoder's start token."""
    from ctranslate2.converters import TransformersConverter

    source, made = folder / "checkpoint", folder / "converted"
    shutil.copytree(checkpoint, source)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (source / "config.json").write_text(json.dumps(BART | config), encoding="utf-8")
    TransformersConverter(str(source)).convert(str(made))
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    for name in ("bos_token", "unk_token"):
        config[name] = config[name] or config["decoder_start_token"]
    config = {name: value for name, value in config.items() if value is not None}
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def answer(model: Any, words: list[str], request: dict[str, Any]) -> dict[str, Any]:
    source = [words[token] for token in request["source"]]
    began = perf_counter()
    result = model.translate_batch(
        [source],
        beam_size=request["width"],
        num_hypotheses=request["width"],
        max_decoding_length=request["max_tokens"],
        min_decoding_length=0,
        length_penalty=request["length_penalty"],
        return_scores=True,
    )[0]
    seconds = perf_counter() - began
    index = {word: token for token, word in enumerate(words)}
    beams = [[index[word] for word in beam] for beam in result.hypotheses]
    return {"beams": beams, "scores": list(result.scores), "seconds": seconds}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard error, not among the answers
    import ctranslate2

    about = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory(prefix="forerun-ctranslate2-") as folder:
        made = converted(Path(about["model"]), Path(folder))
        words = json.loads((made / "shared_vocabulary.json").read_text(encoding="utf-8"))
        model = ctranslate2.Translator(
            str(made), device="cpu", compute_type="float32", inter_threads=1, intra_threads=about["threads"]
        )
        reported = {"version": ctranslate2.__version__, "rows": ["ctranslate2"], "about": "CTranslate2"}
        print(json.dumps(reported), file=replies, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(model, words, json.loads(line))), file=replies, flush=True)


main()
