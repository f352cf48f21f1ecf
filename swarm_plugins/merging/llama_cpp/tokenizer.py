"""A tokenizer as llama.cpp reads it: of bytes, or of sentence pieces, both with merges."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CheckpointError, SwarmError, UnsupportedError, one_line
from swarm_plugins.hub.folder import TOKENIZER_FILES
from swarm_plugins.merging.llama_cpp.library import gguf_py

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = "ByteLevel"
_BYTES_ALONE = "ByteLevel with use_regex=False"
_SPLITS: Mapping[tuple[str, ...], str] = {
    (_BYTES,): "gpt-2",
    ("Digits", _BYTES): "smollm",
    (rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", _BYTES_ALONE): "llama-bpe",
    (rf"{_WORDS}|\p{{N}}|{_REST}", _BYTES_ALONE): "qwen2",
}
"""How text is cut before it is merged, in the words of tokenizer.json and of llama.cpp."""
_USUAL = {
    "add_prefix_space": False, "behavior": "Isolated", "individual_digits": True, "invert": False, "use_regex": True,
}  # fmt: skip
"""The usual settings of a step; with any other it cuts differently."""
_SPACE = "\u2581"


class _Vocabulary(NamedTuple):
    model: str
    """llama.cpp's word for the kind."""
    split: str
    """Its word for how text is cut."""
    tokens: list[str]
    scores: list[float] | None
    """Of sentence pieces."""
    merges: list[str]
    """Of bytes."""
    kinds: list[int]
    has_prefix: bool
    """Whether a text begins with a space that it does not have."""


def add_tokenizer(writer: Any, checkpoint: Checkpoint, num_rows: int) -> None:
    """Writes the tokenizer of a checkpoint.

    Args:
        writer: Of gguf-py.
        checkpoint: The checkpoint.
        num_rows: Tokens that the embeddings have rows for; those without a name get one.

    Raises:
        CheckpointError: If its files are damaged.
        UnsupportedError: If llama.cpp has no tokenizer like it.
    """
    folder = None
    for name in TOKENIZER_FILES:
        if name in checkpoint.file_names():
            folder = checkpoint.file_path(name).parent
    if folder is None:
        raise CheckpointError(f"{checkpoint.name} has no tokenizer: save it beside the model with save_pretrained")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        vocabulary = _read(json.loads(tokenizer.backend_tokenizer.to_str()), checkpoint.name, num_rows)
        special = gguf_py().SpecialVocab(folder, load_merges=False, n_vocab=num_rows)
        special.merges = vocabulary.merges
        special.add_special_token |= _ends(tokenizer, checkpoint.name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as exc:
        if isinstance(exc, SwarmError):
            raise
        raise CheckpointError(
            f"the tokenizer of {checkpoint.name} cannot be read ({one_line(exc, with_kind=True)}): fetch it again"
        ) from exc
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.split)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.has_prefix)
    special.add_to_gguf(writer, quiet=True)


def _ends(tokenizer: Any, name: str) -> dict[str, bool]:
    """Returns whether a text gets a token at its start and at its end; by default, llama.cpp goes by the kind."""
    plain, whole = (tokenizer("a", add_special_tokens=is_whole)["input_ids"] for is_whole in (False, True))
    bos, eos = [tokenizer.bos_token_id], [tokenizer.eos_token_id]
    for has_bos in (False, True):
        for has_eos in (False, True):
            if whole == bos * has_bos + plain + eos * has_eos:
                return {"bos": has_bos, "eos": has_eos}
    raise UnsupportedError(
        f"the tokenizer of {name} makes {whole} of the text {plain}; GGUF knows one token before, {bos}, and one "
        f"after, {eos}"
    )


def _read(found: Mapping[str, Any], name: str, num_rows: int) -> _Vocabulary:
    model = found["model"]
    if model.get("type") != "BPE":
        raise UnsupportedError(
            f"the tokenizer of {name} is of the type {model.get('type')!r}, GGUF is written of the type BPE"
        )
    by_id: dict[int, str] = {index: token for token, index in model["vocab"].items()}
    added = {entry["id"]: entry for entry in found.get("added_tokens", ())}
    by_id |= {index: entry["content"] for index, entry in added.items()}
    if by_id and max(by_id) >= num_rows:
        raise CheckpointError(
            f"the tokenizer of {name} has a token with the number {max(by_id)}, the model has {num_rows} rows"
        )
    is_pieces = bool(model.get("byte_fallback"))
    kinds = gguf_py().TokenType

    def kind(index: int) -> int:
        if index not in by_id:
            return int(kinds.UNUSED)
        if by_id[index] == model.get("unk_token"):
            return int(kinds.UNKNOWN)
        if index in added:
            return int(kinds.CONTROL if added[index]["special"] else kinds.USER_DEFINED)
        is_byte = is_pieces and len(by_id[index]) == 6 and by_id[index].startswith("<0x")
        return int(kinds.BYTE if is_byte else kinds.NORMAL)

    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(num_rows)]
    types = [kind(index) for index in range(num_rows)]
    if not is_pieces:
        merges = [" ".join(pair) for pair in _pairs(model)]
        return _Vocabulary("gpt2", _split(found, name), tokens, None, merges, types, has_prefix=False)
    _check_pieces(found, name)
    return _Vocabulary("llama", "default", tokens, _scores(model, tokens), [], types, has_prefix=_has_prefix(found))


def _split(found: Mapping[str, Any], name: str) -> str:
    changes, cuts = _steps(found)
    words = tuple(map(_word, cuts))
    _check_known([_word(step) for step in changes], [] if words in _SPLITS else words or ["nothing"], name)
    return _SPLITS[words]


def _check_pieces(found: Mapping[str, Any], name: str) -> None:
    """Raises UnsupportedError if more than marks for spaces makes sentence pieces: llama.cpp knows no more."""
    changes, cuts = ([_word(step) for step in steps if not _is_mark(step)] for steps in _steps(found))
    _check_known(changes, cuts, name)


def _steps(found: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Returns how text is changed, and how it is cut."""
    normal, before = found.get("normalizer") or {}, found.get("pre_tokenizer") or {}
    # NFC is accepted although llama.cpp skips it: nearly all text is in this form already.
    changes = [step for step in normal.get("normalizers", [normal]) if step and step["type"] != "NFC"]
    return changes, [step for step in before.get("pretokenizers", [before]) if step]


def _is_mark(step: Mapping[str, Any]) -> bool:
    is_space = step.get("pattern") == {"String": " "}
    if step["type"] == "Split":  # of Gemma, after its spaces have become marks
        return is_space and step.get("behavior") == "MergedWithPrevious"
    return {
        "Prepend": step.get("prepend") == _SPACE,
        "Replace": is_space and step.get("content") == _SPACE,
        "Metaspace": step.get("replacement") == _SPACE,
    }.get(step["type"], False)


def _check_known(changes: Sequence[str], cuts: Sequence[str], name: str) -> None:
    if changes or cuts:
        what = f"changes text by {' and '.join(changes)}" if changes else f"cuts text by {' and '.join(cuts)}"
        raise UnsupportedError(
            f"the tokenizer of {name} {what[:300]}, which is not among the ways that are written as GGUF: merge into a "
            "folder, and convert it with llama.cpp's convert_hf_to_gguf.py"
        )


def _word(step: Mapping[str, Any]) -> str:
    word = step.get("pattern", {}).get("Regex") or str(step.get("type"))
    unusual = [f"{key}={step[key]}" for key, usual in _USUAL.items() if step.get(key, usual) != usual]
    return f"{word} with {', '.join(unusual)}" if unusual else word


def _scores(model: Mapping[str, Any], tokens: list[str]) -> list[float]:
    """Returns scores by which sentence pieces are merged in the order of the merges."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(_pairs(model)):
        ranks.setdefault("".join(pair), rank)
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def _pairs(model: Mapping[str, Any]) -> list[list[str]]:
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]


def _has_prefix(found: Mapping[str, Any]) -> bool:
    steps = [found.get("normalizer") or {}, found.get("pre_tokenizer") or {}]
    steps += [one for step in steps for one in (*step.get("normalizers", ()), *step.get("pretokenizers", ()))]
    return any(
        step.get("prepend") == _SPACE
        or (step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
