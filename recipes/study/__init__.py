"""The claims of DeepSpeed-MoE (Rajbhandari et al. 2022) about small models, at the scale of a laptop.

```text
corpus.py      the text, its split and its tokens
settings.py    what a run depends on; its hash names the run
arms.py        the models that are compared, and the claims about them
training.py    one run: resumable, batches and initial weights fixed by the seed
runner.py      all runs, one process a core
intervals.py   paired differences and their t-intervals
verdicts.py    intervals in words
report.py      outcomes of the claims, tables
cost.py        parameters, latency and throughput of trained models, measured in turns
plots.py       the pictures
drawing.py     their colors, for light and dark pages
```

Run it with ``python -m recipes.study``.
"""
