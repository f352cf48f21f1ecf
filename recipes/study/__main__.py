"""The claims of DeepSpeed-MoE about small models: trains, compares and measures them, and writes the report.

```console
pip install -c constraints.txt -e '.[demo,plot]'        # the text, and pictures
python -m recipes.study                                 # hours on two cores; killed, it goes on where it was
python -m recipes.study --seeds 8 --steps 4000          # what it found before with other settings is kept
python -m recipes.study --seeds 8 --record earlier/prmoe-study.json     # goes on where another machine ended
python -m recipes.study --device cuda --jobs 4          # runs share the GPU
python -m recipes.study --stage cost                    # again the part that needs a quiet machine
```

Results: ``report.md``, ``prmoe-study.json`` and pictures in ``--output``.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from swarm_plugins.errors import SwarmError
from recipes.study.arms import Plan
from recipes.study.settings import Training
from recipes.study.study import Study

import torch


def parse() -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(prog="python -m recipes.study", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("runs/prmoe_study"), help="keeps runs and text")
    parser.add_argument("--record", type=Path, help="prmoe-study.json of an earlier report: its runs are not repeated")
    parser.add_argument("--output", type=Path, help="where the report goes; default: --dir")
    parser.add_argument(
        "--stage", choices=["all", "train", "words", "cost", "report"], default="all", help="what to do"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm, at least 3")
    parser.add_argument("--arms", nargs="+", help="train and report these alone, teachers included; default: all")
    parser.add_argument("--steps", type=int, default=800, help="steps of a run")
    parser.add_argument("--rows", type=int, default=8, help="sequences of a step")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="of AdamW, after the warmup")
    parser.add_argument("--width", type=int, default=96, help="hidden size")
    parser.add_argument("--vocab-size", type=int, default=1024, help="tokens of the BPE")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, of one thread each")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    return parser.parse_args()


def main() -> None:
    """Runs the study."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("recipes.study").setLevel(logging.INFO)
    torch.set_num_threads(1)
    options = parse()
    try:
        run(options)
    except SwarmError as error:
        sys.exit(f"study: {error}")


def run(options: argparse.Namespace) -> None:
    """Trains, measures and reports, as far as the options ask for it."""
    training = Training(
        steps=options.steps,
        rows=options.rows,
        length=options.length,
        learning_rate=options.learning_rate,
        warmup_steps=max(1, options.steps // 20),
    )
    study = Study(
        Plan(training=training, vocab_size=options.vocab_size, width=options.width),
        folder=options.dir,
        seeds=range(options.seeds),
        device=options.device,
        arms=options.arms,
    )
    if options.record is not None:
        study.go_on_from(options.record)
    if options.stage in ("all", "train"):
        study.train(jobs=options.jobs)
    if options.stage in ("all", "words"):
        study.measure_words()
    if options.stage in ("all", "cost"):
        study.measure_cost()
    study.report(options.output or options.dir)


if __name__ == "__main__":
    main()
