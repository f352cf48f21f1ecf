"""Distillation without a Trainer: what stays with the student, and what with the run."""

from __future__ import annotations

import copy
import pickle

import torch
from distill_kit import ROWS
from transformers import PreTrainedModel

from swarm_plugins.distill import Distillation


def test_a_copy_made_while_it_learns_takes_no_teacher_along(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    plain = len(pickle.dumps(student))
    distillation = Distillation(teacher, stop_at=1)
    distillation.begin(student, total_steps=2)
    copied, pickled = copy.deepcopy(student), pickle.dumps(student)
    assert len(pickled) < plain + 2000
    distillation.at(1)
    expected = student(input_ids=ROWS, labels=ROWS).loss
    for one in (copied, pickle.loads(pickled)):
        torch.testing.assert_close(one(input_ids=ROWS, labels=ROWS).loss, expected)
    assert distillation.num_teacher_forwards == 0


def test_a_restored_stop_counts_for_the_resumed_run_alone(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    distillation = Distillation(lambda: teacher, stop_at=0.5)
    distillation.load_state_dict({"stop_at": 0.5, "stop_step": 50})
    stops = []
    for total in (200, 20):
        distillation.begin(student, total_steps=total)
        stops.append(distillation.stop_step)
        distillation.end()
    assert stops == [50, 10]


def test_a_stop_of_one_step_is_not_that_of_a_whole_run(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    distillation = Distillation(teacher, stop_at=1)
    distillation.load_state_dict({"stop_at": 1.0, "stop_step": 50})
    distillation.begin(student, total_steps=50)
    assert distillation.stop_step == 1
    distillation.end()
