"""The notebook of the tutorial is its page, and runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jupytext
import pytest
from nbformat import NotebookNode

from swarm_plugins.testing.models import save_tiny

TUTORIALS = Path(__file__).parent.parent.parent / "docs" / "tutorials"
PAGE, NOTEBOOK = TUTORIALS / "fine-tune.md", TUTORIALS / "fine-tune.ipynb"


def cells(notebook: NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def test_the_notebook_is_what_make_notebook_makes_of_the_page() -> None:
    notebook = jupytext.read(NOTEBOOK)
    assert cells(notebook) == cells(jupytext.read(PAGE)), "run make notebook"
    assert notebook.metadata.kernelspec.name == "python3"
    assert not any(cell.get("outputs") for cell in notebook.cells)


def test_its_text_reads_as_well_outside_of_the_site() -> None:
    # Links to names are resolved when the site is built.
    text = "".join(source for kind, source in cells(jupytext.read(NOTEBOOK)) if kind == "markdown")
    assert "][swarm_plugins" not in text


@pytest.mark.slow
@pytest.mark.swarm
@pytest.mark.timeout(400)
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model")
    notebook = tmp_path / NOTEBOOK.name
    source = NOTEBOOK.read_text()
    named = '\\"HuggingFaceTB/SmolLM2-135M-Instruct\\"'
    assert named in source
    notebook.write_text(source.replace(named, f'\\"{model}\\"'))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbmake", "--nbmake-timeout=300", "-p", "no:cacheprovider", str(notebook)],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").exists()
