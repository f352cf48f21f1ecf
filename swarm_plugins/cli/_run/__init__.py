"""What ``swarm run`` is made of."""
