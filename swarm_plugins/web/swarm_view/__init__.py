"""The state of a swarm, for the page and for programs."""
