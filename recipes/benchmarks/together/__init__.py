"""What training together brings: held-out loss over the same wall-clock time, together and alone."""

from __future__ import annotations
