"""What commands share: errors as one sentence, options, wording."""

from __future__ import annotations
