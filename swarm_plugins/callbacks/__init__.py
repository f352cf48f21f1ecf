"""Adapters between a training run and the Hub; the public names are in `swarm_plugins` itself.

```text
for_lightning.py      HubAdapterCallback          both spellings of Lightning
for_transformers.py   HubAdapterTrainerCallback
publishing.py         what both share: when to publish, and what happens if that fails
saving.py             one version of an adapter as a folder
loading.py            load_adapter
```

Nothing is imported here: each of them needs libraries that the others do not.
"""
