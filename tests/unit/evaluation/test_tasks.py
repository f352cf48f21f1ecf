"""Task files: what they are, what they are not, and what their digest covers."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import lm_eval.utils
import pytest
from datasets import load_dataset
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from evaluation_kit import write_task
from jinja2.exceptions import SecurityError
from lm_eval.tasks import TaskManager, _factory

from swarm_plugins.errors import ConfigError
from swarm_plugins.evaluation import scoring, tasks
from swarm_plugins.evaluation.scoring import Tasks
from swarm_plugins.evaluation.tasks import EvalSettings, is_task_file, read_task_file

GOOD = "task: mine\ndataset_path: org/data\n"
LOCAL = "task: mine\ndataset_path: json\n"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param("", r"it is empty, or has more than 1048576 bytes", id="empty"),
        pytest.param(" " * ((1 << 20) + 1), r"it is empty, or has more than 1048576 bytes", id="huge"),
        pytest.param("just text", r"expected KEY: VALUE lines, such as task: NAME", id="text"),
        pytest.param("{a: [", r"is not a task file: it is not YAML", id="no YAML"),
        pytest.param("\x00\x01", r"is not a task file: it is not YAML", id="binary"),
        pytest.param("dataset_path: json", r"has task: None\): it needs task: NAME", id="without a name"),
        pytest.param("task: yes", r"has task: True\): it needs task: NAME", id="a name that is none"),
        pytest.param("group: all\ntask: [a, b]", r"a group of tasks\): it needs task: NAME", id="group"),
        pytest.param(f"{GOOD}num_fewshot: many", r"num_fewshot: 'many'; it must be a number", id="few-shot"),
        pytest.param(f"{GOOD}include: task.yaml", r"included more than 8 files deep, or includes itself", id="loop"),
        pytest.param(f"{GOOD}include: none.yaml", r"none.yaml cannot be read \(No such file", id="include"),
        pytest.param(
            f"{LOCAL}dataset_kwargs: {{data_files: {{test: none.jsonl}}}}",
            r"data file 'none.jsonl' of .* cannot",
            id="data",
        ),
        pytest.param(
            f"{LOCAL}dataset_kwargs: {{data_dir: none}}", r"^the data of .* cannot be read.*none, or", id="folder"
        ),
        pytest.param(LOCAL, r"does not say which files of format json it reads: give dataset_kwargs", id="which data"),
        pytest.param(
            f"{GOOD}doc_to_text: !function os.system",
            r"would run Python code \(!function os.system\); give --allow-code",
            id="code",
        ),
        pytest.param(f"{GOOD}class: !function mine.Task", r"would run Python code", id="class"),
        pytest.param(f"{GOOD}doc_to_text: !!python/name:os.system ''", r"is not YAML", id="tag"),
        pytest.param(f"{GOOD}use_prompt: 'a.yaml:b'", r"another file \(use_prompt\): write doc", id="prompt"),
        pytest.param(f"{GOOD}unsafe_code: true", r"would run Python code \(unsafe_code: True\)", id="unsafe"),
        pytest.param(
            f"{GOOD}metric_list: [{{metric: mine, hf_evaluate: true}}]",
            r"code of a metric from the Hub \(mine\)",
            id="metric",
        ),
    ],
)
def test_what_is_no_task_file_is_one_sentence(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        read_task_file(file)


def grown(line: str) -> str:
    """Lines of which each names the one before nine times."""
    return "\n".join(line.format(n=n, before=", ".join([f"*a{n - 1}"] * 9)) for n in range(1, 12))


@pytest.mark.parametrize(
    ("first", "content"),
    [
        pytest.param("x", grown("a{n}: &a{n} [{before}]"), id="lists"),
        pytest.param("{k: x}", grown("a{n}: &a{n} {{<<: [{before}]}}"), id="merged"),
        pytest.param("x", grown("a{n}: &a{n} !!pairs [k: [{before}]]"), id="pairs"),
        pytest.param("x", "deep: &a [*a]", id="endless"),
        # Made, it would take a minute and a half.
        pytest.param("x", f"long: 1{':1' * 480_000}", id="number"),
    ],
)
def test_what_stands_for_more_than_it_says_is_refused(tmp_path: Path, first: str, content: str) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(f"{GOOD}a0: &a0 {first}\n{content}\ndataset_kwargs: {{data_files: x}}")
    with pytest.raises(ConfigError, match=r"expands to (inf|\d(\.\d+)?e\+1\d) values, the limit is 100000"):
        read_task_file(file)


def test_no_description_of_data_is_expanded(tmp_path: Path) -> None:
    """`datasets` reads YAML beside the data; what its aliases stand for is shared there, and nobody walks it."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "test.jsonl").write_text('{"q": "a"}\n')
    bomb = grown("a{n}: &a{n} [{before}]")
    card = f"a0: &a0 x\n{bomb}\nconfigs:\n- {{config_name: default, data_files: '*.jsonl', bomb: *a11}}\n"
    (data / "README.md").write_text(f"---\n{card}---\n")
    (data / ".huggingface.yaml").write_text(card)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = load_dataset(str(data), split="train", cache_dir=str(tmp_path / "cache"))
    assert list(found) == [{"q": "a"}]


def test_lm_eval_gets_what_was_checked_also_behind_links(tmp_path: Path) -> None:
    ran, code = tmp_path / "ran", "open('{}', 'w').close()\n\n\ndef text(doc):\n    return 'is it?'\n"
    shown, real = tmp_path / "shown", tmp_path / "real"
    for folder in (shown, real):
        folder.mkdir()
        write_task(folder)
        (folder / "code.py").write_text(code.format(ran))
    # A link beside which `more.yaml` is harmless; beside what it leads to, it runs code.
    (real / "more.yaml").write_text("doc_to_text: !function code.text\n")
    (shown / "more.yaml").write_text("doc_to_text: is it?\n")
    task = real / "task.yaml"
    task.write_text((real / "honest.yaml").read_text().replace("task: honest", "task: linked\ninclude: more.yaml", 1))
    (shown / "task.yaml").symlink_to(task)
    with pytest.raises(ConfigError, match=r"real/more.yaml would run Python code"):
        Tasks([str(shown / "task.yaml")], EvalSettings())
    (real / "more.yaml").unlink()
    (real / "more.yaml").symlink_to(shown / "more.yaml")
    with pytest.raises(ConfigError, match=r"includes more.yaml, a link to .*shown/more.yaml: name that file"):
        Tasks([str(shown / "task.yaml")], EvalSettings())
    # Changed between check and use.
    (real / "more.yaml").unlink()
    (real / "more.yaml").write_text("doc_to_text: is it?\n")
    tasks = Tasks([str(shown / "task.yaml")], EvalSettings())
    (real / "more.yaml").write_text("doc_to_text: !function code.text\n")
    with pytest.raises(ConfigError, match="would run Python code"):
        tasks.score(tasks.tasks[0], None, None)
    assert not ran.exists()


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml cannot be read \(No such file or directory\)"):
        read_task_file(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)"):
        read_task_file(tmp_path)


@pytest.mark.parametrize("name", ["a.yaml", "a.yml", "./a", "~/a", "b/a"])
def test_files_are_told_from_names(name: str) -> None:
    assert is_task_file(name)
    assert not is_task_file("arc_easy")


def test_the_digest_covers_file_includes_data_and_code_but_not_the_place(tmp_path: Path) -> None:
    def digests(folder: Path) -> str:
        return read_task_file(folder / "task.yaml", allow_code=True).digest

    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "task.yaml").write_text(f"{LOCAL}include: more.yaml\ndataset_kwargs: {{data_files: [one.jsonl]}}\n")
        (folder / "more.yaml").write_text("doc_to_text: !function mine.text\nnum_fewshot: 2\n")
        (folder / "one.jsonl").write_text("{}")
        (folder / "mine.py").write_text("text = str")

    write(tmp_path / "one")
    write(tmp_path / "two")
    before = digests(tmp_path / "one")
    assert digests(tmp_path / "two") == before
    assert read_task_file(tmp_path / "one" / "task.yaml", allow_code=True).num_fewshot == 2
    for name in ("task.yaml", "more.yaml", "one.jsonl", "mine.py"):
        file = tmp_path / "two" / name
        kept = file.read_text()
        file.write_text(f"{kept}\n")
        assert digests(tmp_path / "two") != before, name
        file.write_text(kept)
    with pytest.raises(ConfigError, match=r"more.yaml would run Python code \(!function mine.text\)"):
        read_task_file(tmp_path / "one" / "task.yaml")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param("dataset_path: ./data", id="a folder"),
        pytest.param("dataset_path: {folder}/data", id="a folder by its whole path"),
        pytest.param("dataset_path: ./data\ndataset_kwargs: {{data_files: {{test: more/test.jsonl}}}}", id="its files"),
        pytest.param("dataset_path: .\ndataset_kwargs: {{data_dir: data}}", id="a folder in it"),
        pytest.param("dataset_path: json\ndataset_kwargs: {{data_dir: data}}", id="files of a format"),
        pytest.param(
            "dataset_path: json\ndataset_kwargs: {{data_dir: data, data_files: more/*.jsonl}}", id="some of them"
        ),
        pytest.param("dataset_path: json\ndataset_kwargs: {{data_files: {folder}/data/more/test.jsonl}}", id="a path"),
    ],
)
def test_the_digest_covers_local_data_however_the_task_names_them(tmp_path: Path, data: str) -> None:
    (tmp_path / "data" / "more").mkdir(parents=True)
    (tmp_path / "json").mkdir()  # not what a format of this name reads
    file, questions = tmp_path / "task.yaml", tmp_path / "data" / "more" / "test.jsonl"
    file.write_text(f"task: mine\n{data.format(folder=tmp_path)}\n")
    questions.write_text("{}")
    before = read_task_file(file).digest
    (tmp_path / "data" / "more" / ".hidden").write_text("")
    assert read_task_file(file).digest == before
    questions.write_text('{"question": "is it?"}')
    changed = read_task_file(file).digest
    assert changed != before
    questions.write_text("{}")
    assert read_task_file(file).digest == before


def test_the_digest_covers_names_in_a_folder_and_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, data = tmp_path / "task.yaml", tmp_path / "data"
    file.write_text("task: mine\ndataset_path: ./data\n")
    data.mkdir()
    (data / "test.jsonl").write_text("{}")
    before = read_task_file(file).digest
    (data / "test.jsonl").rename(data / "train.jsonl")
    assert read_task_file(file).digest != before
    monkeypatch.setattr(tasks, "_MAX_DATA_FILES", 0)
    with pytest.raises(ConfigError, match=r"data has more than 0 data files; name those of the task: data_files"):
        read_task_file(file)


def test_formats_are_those_of_datasets() -> None:
    assert set(_PACKAGED_DATASETS_MODULES) <= tasks._FORMATS


GROUPS = {
    "both": "task: [arc_easy, arc_challenge]",
    "outer": "task: [{group: inside, task: [{group: both}, plain], num_fewshot: 3}]",
    "given": "num_fewshot: 2\ntask: [both, plain, {group: inside, task: [arc], num_fewshot: 3}]",
    "changed": "task: [plain, {task: arc_easy, num_fewshot: 0}, {group: both, num_fewshot: 0}]",
    "unnamed": "num_fewshot: 2\ntask: [{task: new, dataset_path: x, num_fewshot: 3}, {task: arc_easy, num_fewshot: 3}]",
    "mixed": "task: [both, plain]",
}


class Listed(SimpleNamespace):
    """A task of a group, which reads no data."""

    few: ClassVar[list[int]] = []
    """Numbers of examples of those made."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(task_name=config["task"], config=config)
        self.few.append(config.get("num_fewshot") or 0)


@pytest.fixture
def few_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm_eval with a few tasks of its own, of which two have a tag, and groups."""
    own = tmp_path / "lm_eval"
    own.mkdir()
    for name in ("arc_easy", "arc_challenge"):
        (own / f"{name}.yaml").write_text(f"task: {name}\ntag: arc\ndataset_path: org/arc\nnum_fewshot: 5\n")
    (own / "plain.yaml").write_text("task: plain\ndataset_path: org/plain\n")
    for name, members in GROUPS.items():
        (own / f"{name}.yaml").write_text(f"group: {name}\n{members}\n")
    monkeypatch.setattr(
        scoring, "TaskManager", lambda include_defaults: TaskManager(include_path=str(own), include_defaults=False)
    )


@pytest.mark.usefixtures("few_known")
def test_tasks_of_lm_eval_are_found_by_name_or_tag() -> None:
    found = Tasks(["arc", "arc_easy"], EvalSettings()).tasks
    assert [(one.name, one.num_fewshot) for one in found] == [("arc_challenge", 5), ("arc_easy", 5)]
    assert found[0].digest != found[1].digest
    with pytest.raises(
        ConfigError, match=r"no task named 'arc_esy'; similar names: arc_easy.*; a task of your own is a file"
    ):
        Tasks(["arc_esy"], EvalSettings())
    with pytest.raises(ConfigError, match=r"no task named '' *|lists them"):
        Tasks(["zzzzzzzz"], EvalSettings())


@pytest.mark.usefixtures("few_known")
@pytest.mark.parametrize("group", [name for name in GROUPS if name != "mixed"])
def test_a_group_has_the_examples_of_its_tasks(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = Tasks([group], EvalSettings())
    (found,) = tasks.tasks
    # What lm_eval makes of it, without data.
    monkeypatch.setattr(_factory, "ConfigurableTask", Listed)
    monkeypatch.setattr(Listed, "few", [])
    tasks._load(found)
    assert set(Listed.few) == {found.num_fewshot}
    assert tasks.setting(found) != Tasks([group], EvalSettings(num_fewshot=7)).setting(found)
    own = tmp_path / "lm_eval" / "arc_easy.yaml"
    own.write_text(f"{own.read_text()}\n")
    assert Tasks([group], EvalSettings()).tasks[0].digest != found.digest


@pytest.mark.usefixtures("few_known")
def test_a_group_of_different_examples_needs_one_number() -> None:
    with pytest.raises(ConfigError, match=r"^the tasks of mixed have different numbers of examples \(0, 5\), .* give"):
        Tasks(["mixed"], EvalSettings())
    tasks = Tasks(["mixed"], EvalSettings(num_fewshot=0))
    assert tasks.setting(tasks.tasks[0]).num_fewshot == 0


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    one, two = write_task(tmp_path), tmp_path / "two.yaml"
    two.write_text(f"{one.read_text()}num_fewshot: 1\n")
    with pytest.raises(ConfigError, match=r"^two different tasks are named honest: rename one"):
        Tasks([str(one), str(two)], EvalSettings())
    assert len(Tasks([str(one), str(one)], EvalSettings()).tasks) == 1


def test_a_metric_that_lm_eval_does_not_have_would_be_code(tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(f"{GOOD}metric_list: [{{metric: stranger/metric}}]")
    with pytest.raises(ConfigError, match=r"metric 'stranger/metric', which lm_eval does not have"):
        Tasks([str(file)], EvalSettings())


def test_templates_reach_no_internals() -> None:
    template = "{{ question.__class__.__mro__ }}"
    with scoring._prepared(allow_code=False):
        assert lm_eval.utils.apply_template("{{ question|regex_replace('a', 'b') }}", {"question": "a"}) == "b"
        with pytest.raises(SecurityError):
            lm_eval.utils.apply_template(template, {"question": "a"})
    with scoring._prepared(allow_code=True):
        assert "str" in lm_eval.utils.apply_template(template, {"question": "a"})


@pytest.mark.parametrize("before", [None, "0"])
def test_the_environment_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    with monkeypatch.context() as changes:
        changes.delenv("DISABLE_MULTIPROC", raising=False)
        if before is not None:
            changes.setenv("DISABLE_MULTIPROC", before)
        with scoring._prepared(allow_code=False):
            assert os.environ["DISABLE_MULTIPROC"] == "1"
        assert os.environ.get("DISABLE_MULTIPROC") == before


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("output_type: nothing\n", r"the task honest \(.*\) cannot be run: ValueError: Got invalid output_type"),
        ("colour: blue\n", r"cannot be run: TypeError: .*'colour'"),
    ],
)
def test_a_task_that_cannot_be_run_is_one_sentence(tmp_path: Path, more: str, sentence: str) -> None:
    file = write_task(tmp_path)
    file.write_text(file.read_text() + more)
    tasks = Tasks([str(file)], EvalSettings())
    with pytest.raises(ConfigError, match=sentence):
        tasks.score(tasks.tasks[0], None, None)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"limit must be at least 1, got 0"):
        EvalSettings(limit=0)
    with pytest.raises(ConfigError, match=r"num_fewshot must be at least 0, got -1"):
        EvalSettings(num_fewshot=-1)
