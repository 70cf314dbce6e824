"""Planted bugs: each breaks one rule of the protocol, and the tests have to find it."""
