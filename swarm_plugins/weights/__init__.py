"""Frozen weights: how their bytes lie (`formats`), how products are formed (`kernels`), and what holds them."""
