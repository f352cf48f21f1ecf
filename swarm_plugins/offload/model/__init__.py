"""A Hugging Face model whose experts are borrowed from the cache."""
