"""Tests of umt_durable; a package, so that `tests.support` is always this folder and never another distribution's."""
