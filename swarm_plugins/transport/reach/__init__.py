"""Reaching peers otherwise than by the DHT and a port of their own: by a list of addresses, and through relays."""
