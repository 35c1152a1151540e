"""The pool as a whole: brought up, kept in order, reported, checked."""
