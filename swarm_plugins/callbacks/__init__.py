"""Publishes adapters while they are trained and loads published ones; `swarm_plugins` has the public names.

```text
for_lightning.py      HubAdapterCallback          both spellings of Lightning
for_transformers.py   HubAdapterTrainerCallback
publishing.py         common to both: when to publish, and what happens if that fails
saving.py             one version of an adapter as a folder
loading.py            load_adapter
monitoring.py         SwarmMonitor                both spellings of Lightning
```

Nothing is imported here: each needs libraries that the others do not.
"""
