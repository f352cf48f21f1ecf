"""What the bytes of an expert mean, and how to multiply with them."""
