"""The app as it was."""
