"""Where servers place themselves, in simulated swarms."""
