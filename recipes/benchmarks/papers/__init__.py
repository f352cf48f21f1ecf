"""The tables and figures of the three papers, repeated in the small: one command, table, picture and verdict each."""
