"""The suite. Helpers are imported by their full path: `tests.support` has those of several folders."""
