"""Coroutines that test what the client does when servers fail run in virtual time."""

from virtual_time import anyio_backend as anyio_backend
