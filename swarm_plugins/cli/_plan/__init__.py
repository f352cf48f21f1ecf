"""What ``swarm plan`` is made of."""
