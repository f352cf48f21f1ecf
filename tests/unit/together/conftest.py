"""Coroutines that test peers that train together run in virtual time."""

from virtual_time import anyio_backend as anyio_backend
