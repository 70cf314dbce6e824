"""The crash matrix as a command: which cells, how many passed, and one JSON object at the end."""
