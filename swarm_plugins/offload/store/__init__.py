"""Where experts lie on disk: in the original checkpoint, or in a quantized store."""
