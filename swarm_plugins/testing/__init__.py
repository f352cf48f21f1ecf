"""Public test kit: small models, and stand-ins for the Hub and the network."""
