"""Records of evaluations: in a file, on the card, in the search."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from evaluation_kit import RECORD
from huggingface_hub import ModelCard

from swarm_plugins.errors import CheckpointError
from swarm_plugins.hub import AdapterFacts, EvalRecord, Manifest, card_text
from swarm_plugins.hub.results import (
    BASE_TAG,
    RESULTS_FILE,
    add_results,
    format_results,
    in_order,
    merged,
    parse_results,
    read_results,
    series_of,
)
from swarm_plugins.hub.results_card import results_table, with_results

RESULT_OF_OTHERS = (
    "model-index: [{{name: n, results: [{{task: {{type: {task}}}, dataset: {{type: d, name: d}}, "
    "metrics: [{{type: acc, value: 1}}], source: {source}}}]}}]"
)
CARD = card_text(AdapterFacts(repo_id="me/adapter", base_model="org/base"), Manifest(metrics={"val_loss": 1.5}))


def record(number: int, **changes: object) -> EvalRecord:
    return msgspec.structs.replace(RECORD, **{"tag": f"v{number}", "commit": str(number % 10) * 40, **changes})


def shown(card: str, records: list[EvalRecord]) -> str:
    return with_results(card, records, repo_id="me/adapter", url="https://hub.example")


def test_records_come_back_from_their_file(tmp_path: Path) -> None:
    assert read_results(tmp_path) == []
    records = [record(1), record(2, stderr=None, limit=3, chat_template=True)]
    assert add_results(tmp_path, records) == records
    assert add_results(tmp_path, [record(2, limit=3, chat_template=True, value=0.0), record(3)]) == [
        *records,
        record(3),
    ]
    assert read_results(tmp_path) == [*records, record(3)]
    assert parse_results(format_results(records) + b"\n\n", "x") == records


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"{", r"^line 2 of mine is not a result"),
        (b'{"tag": "v1"}', r"^line 2 of mine is not a result .*missing required field"),
        (format_results([RECORD]).replace(b"0.625", b'"high"'), r"Expected `float`"),
        (format_results([RECORD]).replace(b"1" * 40, b"../../etc"), r"commit"),
        (format_results([RECORD]).replace(b"capitals", b"c" * 201), r"length <= 200"),
        (b"\xff", r"^line 2 of mine"),
    ],
)
def test_a_line_that_is_no_record_is_named(line: bytes, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        parse_results(format_results([RECORD]) + line, "mine")


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / RESULTS_FILE).open("wb") as stream:
        stream.truncate((16 << 20) + 1)
    with pytest.raises(CheckpointError, match=r"has 16777217 bytes; results have at most 16777216"):
        read_results(tmp_path)


def test_what_measures_the_same_is_kept_once() -> None:
    same = record(1, value=0.1, software={})
    others = [
        record(1, **change)
        for change in ({"limit": 4}, {"task_digest": "e" * 64}, {"metric": "f1"}, {"num_fewshot": 1})
    ]
    assert merged([RECORD], [same, *others]) == [RECORD, *others]


def test_versions_are_in_the_order_of_their_numbers() -> None:
    assert in_order(["v10", "v2", "v1"]) == ["v1", "v2", "v10"]
    assert in_order(["1.10", "1.9", "1.9-rc"]) == ["1.9", "1.9-rc", "1.10"]
    assert in_order(["\u00b2", "2"]) == ["\u00b2", "2"], "a digit that is no number"


def test_settings_that_differ_have_columns_of_their_own() -> None:
    changed = record(2, task_digest="e" * 64)
    labels = [
        one.label for one in series_of([record(1), record(2, num_fewshot=2, limit=5), record(2, filter="strict")])
    ]
    assert labels == ["capitals acc", "capitals (2-shot, first 5) acc", "capitals acc (strict)"]
    assert [one.label for one in series_of([record(1), changed])] == [
        "capitals (ddddddd) acc",
        "capitals (eeeeeee) acc",
    ]
    moved = record(1, commit="f" * 40, value=0.75)
    assert results_table(series_of([record(1), record(10), moved]))[1:] == [
        ["v10", "0.625 ± 0.12"],
        ["v1", "0.75 ± 0.12"],
    ]


def test_the_card_gets_a_table_and_the_index_of_the_newest_version() -> None:
    text = shown(CARD, [record(1), record(2, value=0.75)])
    card = ModelCard(text)
    assert "| v2 | 0.75 ± 0.12 |\n| v1 | 0.625 ± 0.12 |" in card.text
    assert "![Each metric over the versions, with its standard error](results.png)" in card.text
    training, ours = card.data.eval_results
    assert (training.metric_type, training.metric_value) == ("val_loss", 1.5)
    assert (ours.dataset_name, ours.metric_type, ours.metric_value) == ("capitals", "acc", 0.75)
    assert ours.source_url == "https://hub.example/me/adapter/blob/main/results.jsonl"
    assert card.data.base_model == "org/base"
    assert shown(text, [record(1), record(2, value=0.75)]) == text
    again = shown(text, [record(1), record(2), record(3, value=1.0)])
    assert again.count("swarm eval: begin") == 1
    assert [one.metric_value for one in ModelCard(again).data.eval_results] == [1.5, 1.0]


def test_the_base_is_the_last_row_and_not_in_the_index() -> None:
    base = record(0, tag=BASE_TAG, commit="a" * 40, value=0.5)
    card = ModelCard(shown(CARD, [base, record(1)]))
    assert "| v1 | 0.625 ± 0.12 |\n| (base) | 0.5 ± 0.12 |" in card.text
    assert [one.metric_value for one in card.data.eval_results] == [1.5, 0.625]
    assert [one.metric_value for one in ModelCard(shown(CARD, [base])).data.eval_results] == [1.5]


def test_what_others_wrote_on_the_card_stays() -> None:
    text = shown("---\nlicense: mit\nmine: 7\n---\n# Mine\n\nWords.\n", [RECORD])
    card = ModelCard(text.replace("eval: end -->\n", "eval: end -->\n\nMore words.\n"))
    again = ModelCard(shown(str(card), [RECORD, record(2)]))
    assert (again.data.license, again.data.to_dict()["mine"]) == ("mit", 7)
    assert "Words." in again.text
    assert "More words." in again.text
    assert shown("", [RECORD]).startswith("---\nmodel-index:")


@pytest.mark.parametrize(
    "metadata",
    [
        "a: [",
        "- 1",
        "model-index:\n- 1",
        "one: &one [1]\nmodel-index: [*one, *one]",
        "pipeline_tag: [text-generation]",
        RESULT_OF_OTHERS.format(task="t", source="abc"),
        RESULT_OF_OTHERS.format(task="[t]", source="{}"),
        pytest.param(f"a: {'[' * 500}{']' * 500}", id="deep"),
    ],
)
def test_a_card_that_cannot_be_understood_is_refused(metadata: str) -> None:
    for records in ([], [RECORD]):  # also before anything was measured
        with pytest.raises(CheckpointError, match=r"the card \(README.md\) of me/adapter cannot be understood"):
            shown(f"---\n{metadata}\n---\n", records)


def test_every_earlier_section_of_results_goes() -> None:
    once = shown("---\nlicense: mit\n---\nWords.\n", [RECORD])
    section = once[once.index("<!-- swarm eval: begin") :]
    begin = section.splitlines()[0]
    text = shown(f"{once}\nMore.\n\n{section}\nLast.\n{begin} of a thing without an end\n", [RECORD])
    assert text.count("## Results of the versions") == 1
    assert f"Words.\nMore.\nLast.\n{begin} of a thing without an end\n\n{begin}" in text


def test_a_strangers_words_stay_in_their_cell() -> None:
    text = shown(CARD, [record(1, task="a|b\n## <script>")])
    assert "| version | a\\|b ## &lt;script> acc |" in text
