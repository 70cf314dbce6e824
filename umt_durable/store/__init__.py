"""The store: one module per table. Functions take the connection (or the guard that has it) first and never commit."""
