"""The libp2p daemon: its process, its memory, its sockets."""
