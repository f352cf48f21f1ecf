"""Blocks without a living server, run here from the checkpoint until the swarm has them again.

They run in a server of this process, one more peer that the client reaches through memory. Plans know nothing of it: it
is asked only where no server of the swarm holds a block.
"""
