"""Sessions of generation: chains of caches on servers, pushed steps, chunks of prompts."""
