"""A mixture beside llama.cpp, on a toy: both sides decode, with and without a memory limit."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama_cpp_kit import save_model
from rich.progress import Progress

from recipes.benchmarks.llama.process import has_llama_cpp
from recipes.benchmarks.mixture.run import Mixture
from swarm_plugins.errors import ConfigError


def mixture(directory: Path, **changes: str) -> Mixture:
    return Mixture(
        **{"directory": directory, "fast": "50%", "dtype": "bfloat16", "new_tokens": 4, "rounds": 1} | changes
    )


@pytest.mark.slow
@pytest.mark.skipif(not has_llama_cpp(), reason="the wheel xllamacpp is not installed")
def test_both_sides_decode_in_memory_and_under_a_limit(tmp_path: Path) -> None:
    model = save_model("mixtral", tmp_path / "model")
    with Progress(disable=True) as progress:
        report = mixture(model).report(progress)
    names = ["a token, all experts in memory", "a token, 50% of the experts in memory"]
    has_limit = any("limit of" in note for note in report.notes)
    assert has_limit == ("all of llama.cpp's file fits into that limit: give a smaller --fast" in report.notes), "a toy"
    assert [one.name for one in report.figures] == (names if has_limit else names[:1])
    assert all(one.local and one.local > 0 and one.swarm > 0 and one.goal_is_upper_bound for one in report.figures)
    assert not [path for path in tmp_path.iterdir() if path != model], "converted files are removed"


@pytest.mark.parametrize(
    ("changes", "message"), [({"fast": "0%"}, "invalid --fast '0%'"), ({"dtype": "int8"}, "invalid --dtype 'int8'")]
)
def test_wrong_arguments_are_known_before_anything_is_written(
    tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    with Progress(disable=True) as progress, pytest.raises(ConfigError, match=message):
        mixture(tmp_path, **changes).report(progress)
