"""What a task is asked, and whose fault it is if it fails: the task's, the model's, or the machine's."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import httpx2
import numpy as np
import pytest
import torch
from huggingface_hub.errors import OfflineModeIsEnabled

from swarm_plugins.errors import CapacityError, ConfigError, HubError, SwarmError
from swarm_plugins.evaluation import scoring
from swarm_plugins.evaluation.evaluating import _OF_A_VERSION
from swarm_plugins.evaluation.scoring import Tasks
from swarm_plugins.evaluation.tasks import EvalSettings
from swarm_plugins.testing.models import tiny_model, tiny_tokenizer


class Asked(Exception):
    """What the model was asked."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def score(task_file: Path) -> Callable[..., Any]:
    """Runs the task on a model whose forward pass is given."""

    def run(forward: Callable[..., Any], **settings: Any) -> Any:
        model, tokenizer = tiny_model("llama", num_layers=1), tiny_tokenizer()
        tokenizer.chat_template = "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}"
        model.forward = lambda ids, **options: forward(tokenizer.decode(ids[0]))  # type: ignore[method-assign]
        tasks = Tasks([str(task_file)], EvalSettings(**settings))
        return tasks.score(tasks.tasks[0], model, tokenizer)

    return run


def raising(error: Exception) -> Callable[..., Any]:
    def raise_it(*_: Any, **__: Any) -> Any:
        raise error

    return raise_it


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), id="device"),
        pytest.param(MemoryError(), id="host"),
    ],
)
def test_a_model_without_memory_ends_the_evaluation(score: Callable[..., Any], error: Exception) -> None:
    with pytest.raises(CapacityError, match=r"^there is not enough memory to run the task honest \(") as found:
        score(raising(error))
    assert not isinstance(found.value, _OF_A_VERSION)


def test_an_error_of_the_model_is_not_the_tasks(score: Callable[..., Any]) -> None:
    error = ConnectionError("the model's own")
    with pytest.raises(
        SwarmError, match=r"^the model failed in the task honest: ConnectionError: the model's"
    ) as found:
        score(raising(error))
    assert not isinstance(found.value, _OF_A_VERSION)


def wrapped(error: OSError) -> datasets.exceptions.DatasetGenerationError:
    """What `datasets` makes of an error while it writes its cache."""
    outer = datasets.exceptions.DatasetGenerationError("An error occurred while generating the dataset")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        pytest.param(
            wrapped(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
            "the disk is full .* free space",
            id="disk",
        ),
        pytest.param(ConnectionError("Couldn't reach 'org/data'"), "the Hub cannot be reached .*check", id="network"),
        pytest.param(httpx2.ReadTimeout("timed out"), "the Hub cannot be reached .*timed out", id="download"),
        pytest.param(OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set; unset it", id="offline"),
    ],
)
def test_data_that_cannot_be_read_are_not_the_tasks_fault(
    score: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    monkeypatch.setattr(datasets, "load_dataset", raising(error))
    with pytest.raises(HubError, match=rf"^read the data of the task honest: {sentence}"):
        score(raising(Asked()))


def test_data_that_do_not_exist_are_the_tasks_fault(score: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", raising(datasets.exceptions.DatasetNotFoundError("no 'org/data'")))
    with pytest.raises(ConfigError, match=r"cannot be run: DatasetNotFoundError: no 'org/data'; correct it, or its"):
        score(raising(Asked()))


def test_a_template_that_fails_is_the_tasks_fault(score: Callable[..., Any], task_file: Path) -> None:
    task_file.write_text(task_file.read_text().replace("question", "answer"))
    with pytest.raises(ConfigError, match=r"cannot be run: UndefinedError: 'answer' is undefined; correct it"):
        score(raising(Asked()))


def test_examples_are_turns_of_a_chat_as_in_lm_eval(score: Callable[..., Any], task_file: Path) -> None:
    task_file.write_text(f"{task_file.read_text()}fewshot_split: test\n")
    (task_file.parent / "data.jsonl").write_text('{"question": "is it?"}\n{"question": "was it?"}\n')

    def ask(text: str) -> Any:
        raise Asked(text)

    with pytest.raises(SwarmError, match=r"Asked: .*<user>.*<assistant>.*<user>"):
        score(ask, chat_template=True, num_fewshot=1)
    with pytest.raises(SwarmError, match=r"Asked: [^<]*$"):
        score(ask, num_fewshot=1)


def test_random_numbers_are_those_of_lm_eval_and_the_callers_stay() -> None:
    state, numpys = random.getstate(), np.random.get_state()
    for _ in range(2):
        with scoring._prepared(allow_code=False):
            assert random.random() == random.Random(0).random()
            assert np.random.rand() == np.random.RandomState(1234).rand()
    assert random.getstate() == state
    assert all(map(np.array_equal, np.random.get_state(), numpys))
