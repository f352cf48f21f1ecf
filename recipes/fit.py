"""Any recipe of this folder, in processes that `fabric run` starts: what `swarm fit` does, with the same options.

```console
pip install -c constraints.txt -e '.[demo,lightning]'    # the text, and Lightning
fabric run --strategy swarm recipes/fit.py --config recipes/lora_moe.yaml --offload fast=1GB,bits=4
SWARM_INITIAL_PEERS=/ip4/... fabric run --strategy swarm --devices 2 recipes/fit.py --config recipes/lora_moe.yaml
fabric run --strategy expert_parallel --devices 2 --accelerator cpu recipes/fit.py --config recipes/prmoe.yaml
```

Options before the script belong to `fabric run` and configure the recipe's Trainer; options after it belong to
`swarm fit`. Two runs at once on one machine: give one of them another ``--main-port``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from swarm_plugins.cli import app

_TAKEN = ("accelerator", "strategy", "devices", "num_nodes", "precision")
"""Options of `fabric run` that a Trainer has too; Lightning puts them into the environment."""


def of_fabric(environment: Mapping[str, str]) -> list[str]:
    """Returns the options given to `fabric run` as options of a Trainer."""
    given = {name: environment.get(f"LT_{name.upper()}") for name in _TAKEN}
    return [f"--trainer.{name}={value}" for name, value in given.items() if value is not None]


if __name__ == "__main__":
    app(["fit", *sys.argv[1:], *of_fabric(os.environ)])
