"""Pieces of tokens: what is learned, and that documents of a piece do not see each other."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from swarm_plugins.errors import ConfigError
from swarm_plugins.recipes.packing import Packer

END = "|"
MARKED = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}."
    "{% endgeneration %}{% else %}{{ m.content }}.{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# Writes the last turn otherwise than the ones before, as templates do with reasoning.
CHANGING = PLAIN.replace("{{ m.role[0] }}:", "{{ m.role[0] }}:{% if loop.last and m.role == 'assistant' %}!{% endif %}")
TALK = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "ef"},
    {"role": "assistant", "content": "gh"},
]


def tokenizer(template: str | None = None) -> Any:
    """One token per character; | is the end."""
    letters = Tokenizer(WordLevel({chr(code): code for code in range(128)}, unk_token="?"))
    letters.pre_tokenizer = Split("", "isolated")
    found = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token=END)
    found.chat_template = template
    return found


def packed(rows: dict[str, list[Any]], length: int, *columns: str, template: str | None = None, **options: Any) -> Any:
    return Packer(tokenizer(template), columns, length, **{"across_documents": False, **options})(rows)


def texts(pieces: list[list[int]]) -> list[str]:
    """The characters of each piece; _ for labels without a loss."""
    return ["".join("_" if one == -100 else chr(one) for one in piece) for piece in pieces]


def test_running_text_goes_on_in_the_next_piece_and_positions_start_with_each_document() -> None:
    found = packed({"text": ["abcde", "", "fg", None, "h"]}, 4, "text")
    assert texts(found["input_ids"]) == ["abcd", "e|fg"]
    assert found["position_ids"] == [[0, 1, 2, 3], [0, 1, 0, 1]]
    assert texts(found["labels"]) == ["_bcd", "_|_g"]


@pytest.mark.parametrize("across", [False, True])
def test_running_text_goes_on_from_batch_to_batch(across: bool) -> None:
    rows = ["abc", "de", "", "f", "ghij", "k", "l"]
    documents = [1, 1, 1, 1, 2, 2, 2]
    whole = packed({"text": rows, "document": documents}, 5, "text", across_documents=across)
    pack = Packer(tokenizer(), ("text",), 5, across_documents=across)
    batches = [pack({"text": rows[i : i + 2], "document": documents[i : i + 2]}) for i in range(0, len(rows), 2)]
    assert whole == {name: [piece for batch in batches for piece in batch[name]] for name in whole}
    assert texts(whole["input_ids"]) == ["abc|d", "e|f|g", "hij|k"]


def test_rows_without_a_name_are_documents_of_their_own_in_each_batch() -> None:
    pack = Packer(tokenizer(), ("text",), 4, across_documents=False)
    assert pack({"text": ["a"]})["input_ids"] == []
    assert pack({"text": ["b"]})["position_ids"] == [[0, 1, 0, 1]]


def test_a_document_ends_once_with_a_tokenizer_that_ends_each_text() -> None:
    found = Packer(ByT5Tokenizer(extra_ids=0), ("text",), 8, across_documents=False)({"text": ["abc", "def"]})
    assert found["input_ids"] == [[100, 101, 102, 1, 103, 104, 105, 1]]


def test_a_piece_with_nothing_to_learn_is_left_out() -> None:
    found = packed({"text": ["ab", "cd"]}, 2, "text")
    assert texts(found["input_ids"]) == ["ab", "d|"], "not |c, whose tokens both begin something"
    assert texts(found["labels"]) == ["_b", "_|"]


def test_rows_of_one_document_are_one_text() -> None:
    rows = {"text": ["ab", "cd", "ef"], "document": ["x", "x", "y"]}
    assert packed(rows, 9, "text")["position_ids"] == [[0, 1, 2, 3, 4, 5, 0, 1, 2]]
    found = packed(rows, 9, "text", across_documents=True)
    assert found["position_ids"] == [list(range(9))]
    assert texts(found["labels"]) == ["_b|cd|ef|"]


def test_of_prompts_and_completions_the_completion_is_learned() -> None:
    rows = {"prompt": ["ab", "x" * 9, "c"], "completion": ["cd", "lost", "d"]}
    found = packed(rows, 9, "prompt", "completion")
    # The longest first; what is left is filled. Of the second, cut at the piece's length, nothing is left to learn.
    assert texts(found["input_ids"]) == ["abcd|cd||"]
    assert texts(found["labels"]) == ["__cd|_d|_"]
    assert found["position_ids"] == [[0, 1, 2, 3, 4, 0, 1, 2, 0]]


def test_the_end_that_a_tokenizer_puts_after_a_prompt_is_taken_off() -> None:
    pack = Packer(ByT5Tokenizer(extra_ids=0), ("prompt", "completion"), 4, across_documents=False)
    found = pack({"prompt": ["ab"], "completion": ["c"]})
    assert found["input_ids"] == [[ord("a") + 3, ord("b") + 3, ord("c") + 3, 1]]


def test_prompts_may_be_messages() -> None:
    found = packed({"prompt": [TALK[:3]], "completion": [TALK[3:]]}, 22, "prompt", "completion", template=MARKED)
    assert texts(found["input_ids"]) == ["u:ab.a:cd.u:ef.a:gh.||"]
    assert texts(found["labels"]) == ["_" * 17 + "gh.__"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param(MARKED, "_______cd._______gh.", id="generation"),
        pytest.param(PLAIN, "_______cd._______gh.", id="what-a-turn-adds"),
        pytest.param(CHANGING, "_________________!gh.", id="not-what-is-written-otherwise-later"),
    ],
)
def test_of_a_conversation_the_assistants_turns_are_learned(template: str, expected: str) -> None:
    found = packed({"messages": [TALK]}, len(expected), "messages", template=template)
    assert texts(found["labels"]) == [expected]


def test_conversations_are_whole_and_leave_little_room() -> None:
    sizes = [5, 3, 8, 2, 6, 4, 7, 3]
    rows = {"prompt": ["p"] * len(sizes), "completion": ["c" * (size - 2) for size in sizes]}
    found = packed(rows, 9, "prompt", "completion")
    # 38 tokens cannot be in fewer than 5 pieces of 9.
    whole = ["pcccccc|", "pccccc|", "pcccc|", "pccc|", "pcc|", "pc|", "pc|", "p|"]
    pieces = texts(found["input_ids"])
    assert len(pieces) == 5
    assert sorted(one for piece in pieces for one in re.findall(r"pc*\|", piece)) == sorted(whole)
    assert {len(piece) for piece in pieces} == {9}


def test_messages_without_a_template_are_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"has no chat template, which messages need: give one that has"):
        packed({"messages": [TALK]}, 8, "messages")
