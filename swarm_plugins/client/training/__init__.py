"""Forwards and backwards without a session: in chunks, through chains of servers, as one function of autograd."""
