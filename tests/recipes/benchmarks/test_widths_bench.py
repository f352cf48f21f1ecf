"""Widths beside llama.cpp: which goals a table has, and a run on a toy with files made for llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama_cpp_kit import save_model
from rich.progress import Progress

from recipes.benchmarks.llama.process import has_llama_cpp
from recipes.benchmarks.widths.report import Measured, WidthsReport
from recipes.benchmarks.widths.run import bench_widths
from swarm_plugins.errors import ConfigError


def measured(width: str, ms: float, training_ms: float | None = None) -> Measured:
    return Measured(
        width=width,
        ms_per_token=ms,
        over_local=ms / 60,
        cpu_over_local=None,
        prompt_tokens_per_s=100 * 60 / ms,
        training_ms=training_ms,
    )


def test_a_width_is_held_against_transformers_and_llama_cpps_like() -> None:
    report = WidthsReport(command="widths", model="model", local=measured("transformers, float32", 60, 2000))
    report.figures += [measured("float32", 30, 2000), measured("int8", 15, 1000), measured("nf4", 90, 3000)]
    report.others["Q8_0"] = measured("llama.cpp, Q8_0", 6)
    assert {one.name: (one.value, one.reached) for one in report.goals()} == {
        "a token, float32, over transformers": (0.5, True),
        "a token, int8, over transformers": (0.25, True),
        "a token, int8, over llama.cpp Q8_0": (2.5, False),
        "prompt tokens/s, int8, over transformers": (4.0, True),
        "forward and backward of 8 x 64, int8, times as fast": (2.0, True),
    }
    [widths, goals] = report.tables()
    assert (widths.row_count, goals.row_count) == (5, 5)


@pytest.mark.slow
@pytest.mark.swarm
@pytest.mark.skipif(not has_llama_cpp(), reason="the wheel xllamacpp is not installed")
def test_llama_cpp_decodes_in_turns_with_a_server(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "model")
    with Progress(disable=True) as progress:
        report = bench_widths(
            model,
            widths=["bfloat16"],
            gguf=(),
            is_alone=False,
            prefix_tokens=8,
            new_tokens=4,
            rounds=1,
            progress=progress,
        )
    assert [*report.others] == ["F16"]
    assert [one["name"] for one in report.as_dict()["goals"]] == [
        "a token, bfloat16, over transformers",
        "a token, bfloat16, over llama.cpp F16",
        "prompt tokens/s, bfloat16, over transformers",
        "forward and backward of 8 x 64, bfloat16, times as fast",
    ]


def test_files_and_no_llama_cpp_contradict_each_other(tmp_path: Path) -> None:
    with Progress(disable=True) as progress, pytest.raises(ConfigError, match="give no --gguf with it"):
        bench_widths(
            tmp_path,
            widths=["int8"],
            gguf=[tmp_path / "some.gguf"],
            is_alone=True,
            prefix_tokens=8,
            new_tokens=4,
            rounds=1,
            progress=progress,
        )
