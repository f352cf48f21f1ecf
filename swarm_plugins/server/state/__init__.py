"""What a server keeps between requests: sessions, activations, adapters."""
