"""One handler per rpc, and the checks of what arrives."""
