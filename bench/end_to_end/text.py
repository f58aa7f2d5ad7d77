# SPDX-License-Identifier: Apache-2.0
"""Token ids of real text: files found below folders, a byte-level BPE trained on them, both kept in a cache folder.

The corpus is pinned by a listing with the SHA-256 of every file; the cache is named by the listing and the vocabulary.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import tempfile

import numpy
import torch

SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt", ".c", ".h", ".cpp", ".hpp", ".cu", ".cuh")
HELD_OUT = 20  # one file in so many


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token ids as uint16 or uint32; the listing's SHA-256; how many of the vocabulary's ids the tokenizer has."""

    training: numpy.ndarray
    held_out: numpy.ndarray
    digest: str
    used: int

    def batch(self, seed: int, step: int, rows: int, context: int, rank: int, ranks: int, device) -> tuple:
        """tokens and targets [rows, context] int64 of this rank: `rows` * `ranks` windows that depend on seed and step
        alone, so that a resumed run goes on with the same ones."""
        starts = numpy.random.default_rng([seed, step]).integers(len(self.training) - context, size=rows * ranks)
        return _windows(self.training, starts[rank * rows:(rank + 1) * rows], context, device)

    def evaluation(self, rows: int, context: int, rank: int, ranks: int, batches: int, device):
        """The same windows of the held-out files at every call, spread evenly, in `batches` batches of this rank."""
        starts = numpy.linspace(0, len(self.held_out) - context - 1, rows * ranks * batches).astype(numpy.int64)
        for starts in starts[rank::ranks].reshape(batches, rows):
            yield _windows(self.held_out, starts, context, device)


def _windows(ids, starts, context: int, device) -> tuple:
    windows = torch.from_numpy(numpy.stack([ids[start:start + context + 1] for start in starts]).astype(numpy.int64))
    if torch.device(device).type == "cuda":
        windows = windows.pin_memory().to(device, non_blocking=True)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def listing(paths: list, limit: int) -> list[tuple[str, str]]:
    """(path, SHA-256) of text files in and below `paths`, sorted by path, each content once, until `limit` bytes."""
    files = []
    for path in map(pathlib.Path, paths):
        if not path.exists():
            raise ValueError(f"text {path}: no such file or folder; name what there is to learn from")
        files += [path] if path.is_file() else [p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file()]
    found, seen, total = [], set(), 0
    for path in sorted(set(files)):
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if not content or digest in seen or b"\0" in content:
            continue
        total += len(content)
        if total > limit:
            break
        seen.add(digest)
        found.append((str(path), digest))
    if not found:
        raise ValueError(f"text {' '.join(map(str, paths))}: no text in it; name files or folders with "
                         f"{', '.join(SUFFIXES)} (at most {limit} bytes are read)")
    return found


def _texts(files):
    for path, _ in files:
        yield pathlib.Path(path).read_text(encoding="utf-8", errors="replace")


def _train_tokenizer(files, vocabulary: int):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(_texts(files), trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def _encode(tokenizer, files, dtype) -> numpy.ndarray:
    end, parts, files = tokenizer.token_to_id("<|end|>"), [], list(files)
    for start in range(0, len(files), 256):
        for encoding in tokenizer.encode_batch(list(_texts(files[start:start + 256]))):
            parts.append(numpy.array(encoding.ids + [end], dtype=dtype))
    return numpy.concatenate(parts)


def _fill(folder: pathlib.Path, files: list, listed: str, vocabulary: int) -> None:
    """Makes the folder, whole or not at all, also where several programs do so at once: the first to end names it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as name:
        own = pathlib.Path(name) / "text"
        own.mkdir()
        dtype = numpy.uint16 if vocabulary <= 65536 else numpy.uint32
        held_out = files[HELD_OUT - 1::HELD_OUT] or files[-1:]
        training = [file for file in files if file not in held_out] or files
        tokenizer = _train_tokenizer(training, vocabulary)
        tokenizer.save(str(own / "tokenizer.json"))
        (own / "listing.sha256").write_text(listed, encoding="utf-8")
        for part, of_part in (("training", training), ("held_out", held_out)):
            numpy.save(own / f"{part}.npy", _encode(tokenizer, of_part, dtype))
        (own / "used.json").write_text(json.dumps(tokenizer.get_vocab_size()), encoding="utf-8")
        with contextlib.suppress(OSError):  # another program was first
            own.rename(folder)
    if not (folder / "used.json").exists():
        raise ValueError(f"{folder}: is not whole; remove it, and the same command makes it again")


def prepare(paths: list, vocabulary: int, context: int, cache: pathlib.Path, limit: int = 40_000_000) -> Corpus:
    """Reads the cache or fills it; several programs may do so at once. ValueError for text that is missing, or too
    short for a context. Training reads the first `limit` bytes of the sorted files."""
    if vocabulary < 257:
        raise ValueError(f"vocabulary={vocabulary}: bytes and the end of a file take 257 ids; raise it")
    files = listing(paths, limit)
    text = "".join(f"{digest}  {path}\n" for path, digest in files)
    digest = hashlib.sha256(text.encode()).hexdigest()
    folder = pathlib.Path(cache) / f"text-{digest[:16]}-{vocabulary}"
    if not (folder / "used.json").exists():
        _fill(folder, files, text, vocabulary)
    training, held_out = (numpy.load(folder / f"{name}.npy", mmap_mode="r") for name in ("training", "held_out"))
    for name, ids in (("training", training), ("held-out", held_out)):
        if len(ids) < 2 * context:
            raise ValueError(f"text: {len(ids)} {name} tokens are too few for a context of {context}; name more text")
    return Corpus(training, held_out, digest, json.loads((folder / "used.json").read_text()))
