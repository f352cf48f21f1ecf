"""Training by calls, one adapter a run: forward and backward, a step of the optimizer, a checkpoint.

Nothing here knows of HTTP; `swarm_plugins.web.tinker` serves it by the protocol of Tinker.
"""
