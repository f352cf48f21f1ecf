"""How bytes travel: disk to RAM, RAM to device."""
