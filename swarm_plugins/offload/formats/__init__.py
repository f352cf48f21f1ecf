"""What the buffer of an expert holds, and how to multiply with it."""
