"""A swarm at a distance: tokens, training, prompts and drafts over links with delay."""
