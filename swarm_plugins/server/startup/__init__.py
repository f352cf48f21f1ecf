"""What a server does before it answers: describes itself, chooses its blocks, loads and measures them."""
