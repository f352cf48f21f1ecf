"""OpenAI's ``logprobs`` of tokens that are parts of characters, or look alike."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast
from web_kit import sentence_piece_tokenizer

from swarm_plugins.web.engine.request import Scored
from swarm_plugins.web.protocol.logprobs import chat_logprobs, text_logprobs

TEXT = "a \u00e9\U0001f9a9"


def byte_level() -> PreTrainedTokenizerFast:
    """One token for each byte, as in the vocabularies of GPT-2."""
    tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """One token for each byte, as in the vocabularies of SentencePiece."""
    tokenizer = Tokenizer(WordLevel({f"<0x{byte:02X}>": byte for byte in range(256)}, unk_token="<0x00>"))
    tokenizer.decoder = decoders.ByteFallback()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(params=[byte_level, byte_fallback])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    made: PreTrainedTokenizerFast = request.param()
    return made


def ids(tokenizer: Any, text: str) -> list[int]:
    if "<0x00>" in tokenizer.get_vocab():
        return list(text.encode())
    found: list[int] = tokenizer(text)["input_ids"]
    return found


def test_the_bytes_of_tokens_are_those_of_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    scored = [Scored(token, -1.0, ((token, -1.0),)) for token in ids(tokenizer, TEXT)]
    content = chat_logprobs(tokenizer, scored)["content"]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == TEXT
    assert all(one["top_logprobs"][0]["bytes"] == one["bytes"] for one in content)


def test_tokens_have_the_spaces_that_they_have_within_a_text() -> None:
    tokenizer = sentence_piece_tokenizer()
    tokens = tokenizer.convert_tokens_to_ids(
        ["\u2581Paris", "\u2581is", "Paris", "\u2581" * 4, "return", "\u2581", "x"]
    )
    content = chat_logprobs(tokenizer, [Scored(token, -1.0) for token in tokens])["content"]
    said = bytes(byte for one in content for byte in one["bytes"]).decode()
    assert said == " Paris isParis    return x"
    [top] = text_logprobs(tokenizer, [Scored(3, -0.1, ((3, -0.1), (5, -3.0)))])["top_logprobs"]
    assert top == {" Paris": -0.1, "Paris": -3.0}


def test_of_tokens_with_one_text_the_likeliest_is_named(tokenizer: PreTrainedTokenizerFast) -> None:
    first, second = ids(tokenizer, TEXT)[-2:]
    [top] = text_logprobs(tokenizer, [Scored(first, -0.1, ((first, -0.1), (second, -3.0)))])["top_logprobs"]
    assert top == {"\ufffd": -0.1}


def test_a_later_part_begins_where_the_one_before_ended(tokenizer: PreTrainedTokenizerFast) -> None:
    scored = [Scored(token, -1.0) for token in ids(tokenizer, "abc")]
    assert text_logprobs(tokenizer, scored)["text_offset"] == [0, 1, 2]
    assert text_logprobs(tokenizer, scored, 5)["text_offset"] == [5, 6, 7]
