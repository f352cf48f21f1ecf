"""Many clients at once, whose tokens a server packs into one forward."""
