"""What a person reads while training: in a terminal, in a live table, in a notebook."""
