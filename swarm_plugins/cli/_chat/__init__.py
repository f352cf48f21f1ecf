"""What ``swarm chat`` is made of."""
