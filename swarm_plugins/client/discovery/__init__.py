"""Finding servers: the client's node, the directory, what servers say of themselves, and plans over them."""
