"""llama.cpp's vocabularies with texts and the token ids that their models' own tokenizers give, out of the source
package of llama-cpp-python (MIT). Run as a script, this downloads them once into Forerun's cache folder."""

import hashlib
import tarfile
from pathlib import PurePosixPath

import packages

PACKAGE = "llama-cpp-python==0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
NAMES = (
    "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2",
    "llama-bpe", "mpt", "qwen2", "refact", "starcoder",
)  # fmt: skip
SUFFIXES = (".gguf", ".gguf.inp", ".gguf.out")
SEPARATOR = "\n__ggml_vocab_test__\n"


def folder():
    return packages.folder() / PACKAGE


def texts(name):
    """Texts and their token ids."""
    given = (folder() / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode().split(SEPARATOR)
    expected = (folder() / f"ggml-vocab-{name}.gguf.out").read_text(encoding="utf-8").split("\n")
    return [(text, [int(token) for token in line.split()]) for text, line in zip(given[:-1], expected)]


def download():
    if folder().is_dir():
        return
    with packages.downloaded((PACKAGE,), "--no-binary=llama-cpp-python") as work:  # nothing is compiled
        archive = next(work.glob("*.tar.gz"))
        result = hashlib.sha256(archive.read_bytes()).hexdigest()
        if result != SHA256:
            raise SystemExit(f"{archive.name} has SHA-256 {result}, not {SHA256}")
        expected = {f"ggml-vocab-{name}{suffix}" for name in NAMES for suffix in SUFFIXES}
        made = work / "made"
        made.mkdir()
        with tarfile.open(archive) as file:
            for member in file:
                name = PurePosixPath(member.name).name
                content = file.extractfile(member) if name in expected else None
                if content is not None:
                    (made / name).write_bytes(content.read())
        made.rename(folder())


if __name__ == "__main__":
    download()
