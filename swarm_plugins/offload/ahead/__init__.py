"""Reading experts before they are needed."""
